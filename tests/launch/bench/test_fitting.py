"""`muster bench fit`: the table of fits, the profile it leaves, and what cannot be fitted."""

import json
from pathlib import Path

import pytest

from muster.collectives_bench.cost.profile import load
from muster.collectives_bench.results.files import write_result
from muster.collectives_bench.sizes import time_text
from muster.launch import cli
from muster.launch.bench.fitting import text
from support.costs import OnOneHost, drawn

pytestmark = pytest.mark.slow

OPERATIONS = ("all_reduce", "broadcast", "barrier")


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    """A result file of a drawn cluster in worlds of 2, 3 and 4."""
    write_result(drawn(OnOneHost, OPERATIONS), tmp_path / "r.json")
    return tmp_path / "r.json"


def test_every_fit_is_a_row_with_its_held_out_error_and_the_profile_is_written(measured: Path, capsys) -> None:
    out = measured.parent / "cluster.json"
    assert cli.main(["bench", "fit", str(measured), "-o", str(out)]) == 0
    shown = capsys.readouterr()
    rows = [line.split() for line in shown.out.splitlines() if line.startswith(OPERATIONS)]
    assert [row[:2] for row in rows] == [[name, f"1x{n}"] for n in (2, 3, 4) for name in OPERATIONS]
    assert "held-out sizes   mean" in shown.out
    assert "the first and the last size of a curve are never held out" in shown.out
    assert "held-out worlds  mean" in shown.out
    assert f"wrote {out}" in shown.err
    known = load(out)
    assert (known.name, known.operations) == ("cluster", list(OPERATIONS))


def test_two_results_of_different_worlds_make_one_profile(tmp_path: Path, capsys) -> None:
    for ranks in (2, 3):
        write_result(drawn(OnOneHost, OPERATIONS[:2], worlds=(ranks,)), tmp_path / f"{ranks}.json")
    paths = [str(tmp_path / f"{ranks}.json") for ranks in (2, 3)]
    assert cli.main(["bench", "fit", *paths, "-o", str(tmp_path / "p.json")]) == 0
    assert load(tmp_path / "p.json").constants[0].worlds == [2, 3]
    assert "held-out worlds  not estimated" in capsys.readouterr().out


def test_json_is_the_errors_and_constants_as_data(measured: Path, capsys) -> None:
    assert cli.main(["bench", "fit", str(measured), "-o", str(measured.parent / "p.json"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["curves"]) == 9
    assert 0 <= found["held_out_sizes"]["mean"] <= found["held_out_sizes"]["largest"]
    assert found["constants"][0]["worlds"] == [2, 3, 4]


def test_what_cannot_be_fitted_is_refused_in_one_line(tmp_path: Path, capsys) -> None:
    good = drawn(OnOneHost, ("all_reduce",))
    failed = [each.model_copy(update={"state": "failed", "reason": "x", "latency": None}) for each in good.blocks]
    write_result(good.model_copy(update={"blocks": failed}), tmp_path / "failed.json")
    assert cli.main(["bench", "fit", str(tmp_path / "failed.json"), "-o", str(tmp_path / "p.json")]) == 78
    assert "every measurement failed" in capsys.readouterr().err
    write_result(drawn(OnOneHost, ("all_reduce",), sizes=(1000, 2000)), tmp_path / "few.json")
    assert cli.main(["bench", "fit", str(tmp_path / "few.json"), "-o", str(tmp_path / "p.json")]) == 78
    assert "needs at least 3 sizes" in capsys.readouterr().err
    assert not (tmp_path / "p.json").exists()


@pytest.mark.parametrize(
    ("time_s", "written"),
    [(2.5, "2.5 s"), (0.0123456, "12.35 ms"), (4.2e-5, "42 us"), (0.0, "0 us"), (3e-8, "0.03 us")],
)
def test_times_have_the_unit_that_suits_them(time_s: float, written: str) -> None:
    assert time_text(time_s) == written


def test_nothing_held_out_is_said() -> None:
    assert text(None).startswith("not estimated")
