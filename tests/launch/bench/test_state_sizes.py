"""`muster memory --parameters`: the answers that textbooks and exercises give, and what is wrong on a command line."""

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.launch.bench.state_sizes import BINARY, DECIMAL, StateSizesRequest, size_in, sizes_of
from muster.launch.cli import main

pytestmark = pytest.mark.command

GB = 1e9


def stages(parameters: str, states: int, bits: str, world: int) -> list[float]:
    record = sizes_of(StateSizesRequest(parameters, states, bits, world))
    return [each["per_rank"] for each in record["stages"]]


@pytest.mark.parametrize(
    ("parameters", "states", "bits", "world", "of_a_rank"),
    [
        ("10e9", 3, "16,16,32", 8, (160 * GB, 55 * GB, 37.5 * GB, 20 * GB)),
        ("10B", 1, "16,16,32", 8, (80 * GB, 45 * GB, 27.5 * GB, 10 * GB)),
        ("7.5b", 3, "16", 64, (75 * GB, 2 * 15 * GB + 45 * GB / 64, 15 * GB + 60 * GB / 64, 75 * GB / 64)),
        ("7.5b", 3, "16,16,32", 64, (120 * GB, 31.40625 * GB, 16.640625 * GB, 1.875 * GB)),
        ("1.3M", 0, "32", 1, (10.4e6, 10.4e6, 10.4e6, 10.4e6)),
        ("1", 2, "4,8,8", 2, (3.5, 2.5, 2.0, 1.75)),
    ],
)
def test_known_answers(parameters: str, states: int, bits: str, world: int, of_a_rank: tuple[float, ...]) -> None:
    assert stages(parameters, states, bits, world) == pytest.approx(of_a_rank)


@given(
    p=st.integers(1, 10**12),
    k=st.integers(0, 8),
    s=st.sampled_from((8, 16, 32, 64)),
    w=st.integers(1, 4096),
)
def test_one_precision_is_the_closed_form_and_formulas_are_arithmetic(p: int, k: int, s: int, w: int) -> None:
    size_of = p * s / 8
    found = stages(str(p), k, str(s), w)
    assert found == pytest.approx(
        [(2 + k) * size_of, (2 + k / w) * size_of, (1 + (1 + k) / w) * size_of, (2 + k) * size_of / w]
    )
    for each in sizes_of(StateSizesRequest(str(p), k, str(s), w))["stages"]:
        assert eval(each["formula"].replace("x", "*")) == pytest.approx(each["per_rank"], rel=1e-5)
        assert each["per_rank"] == pytest.approx(each["parameters"] + each["gradients"] + each["optimizer"])
        assert each["all_ranks"] == pytest.approx(each["per_rank"] * w)


def test_the_table_has_both_units_and_the_formula(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["memory", "--parameters", "10e9", "--optimizer-states", "1", "--bits", "16,16,32", "--world", "8"]
    assert main(argv) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("P = 10e9 parameters, N = 8 ranks, K = 1 optimizer state; bits: parameters p = 16,")
    baseline = next(line for line in lines if line.startswith("baseline"))
    assert baseline.split("  ")[-1] == "10e9 x (2 + 2 + 4)"
    assert all(text in baseline for text in (" 80 GB ", " 74.51 GiB ", " 640 GB ", " 596 GiB "))
    assert main([*argv, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["stages"][0]["all_ranks"] == 640e9
    assert [each["name"] for each in record["stages"]] == ["baseline", "stage 1", "stage 2", "stage 3"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ("--parameters", "many", "--optimizer-states", "1", "--world", "8"),
            "--parameters many: expected a number from 1",
        ),
        (("--parameters", "0", "--optimizer-states", "1", "--world", "8"), "--parameters 0: expected a number from 1"),
        (("--parameters", "1e99", "--optimizer-states", "1", "--world", "8"), "--parameters 1e99: expected a number"),
        (("--parameters", "7b", "--world", "8"), "--optimizer-states is missing"),
        (
            ("--parameters", "7b", "--optimizer-states", "99999999", "--world", "8"),
            "--optimizer-states 99999999: expected a whole number from 0 to 64",
        ),
        (("--parameters", "7b", "--optimizer-states", "2"), "--world is missing: expected a whole number from 1"),
        (
            ("--parameters", "7b", "--optimizer-states", "2", "--world", "0"),
            "--world 0: expected a whole number from 1",
        ),
        (
            ("--parameters", "7b", "--optimizer-states", "2", "--world", "8", "--bits", "16,32"),
            "--bits 16,32: expected",
        ),
        (
            ("--parameters", "7b", "--optimizer-states", "2", "--world", "8", "--bits", "16,x,32"),
            "--bits 16,x,32: expected",
        ),
        (("--parameters", "7b", "--optimizer-states", "2", "--world", "8", "--bits", "0"), "--bits 0: expected"),
        (
            ("--parameters", "7b", "--modes", "ddp"),
            "--modes: does not apply to --parameters; leave it out, or name a job",
        ),
        (("--parameters", "7b", "--rank", "0"), "--rank: does not apply to --parameters; leave it out, or name a run"),
        (
            ("job.yaml", "--parameters", "7b"),
            "--parameters 7b: cannot be combined with a job or a run; leave job.yaml out",
        ),
        (("job.yaml", "--bits", "16"), "--bits: does not apply to a job file; leave it out, or add --parameters"),
        (("--bits", "16"), "--bits: does not apply to a run; leave it out, or add --parameters"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(
    capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], message: str
) -> None:
    assert main(["memory", *argv]) == 2
    told = capsys.readouterr().err
    assert message in told
    assert told.count("\n") == 1


def test_sizes_are_written_in_decimal_and_in_binary_units() -> None:
    assert [size_in(DECIMAL, each) for each in (0, 999, 1000, 2.5e9, 1e21)] == [
        "0 B",
        "999 B",
        "1 kB",
        "2.5 GB",
        "1000 EB",
    ]
    assert [size_in(BINARY, each) for each in (1000, 1024, 2**30)] == ["1000 B", "1 KiB", "1 GiB"]


def test_neither_torch_nor_matplotlib_is_imported() -> None:
    argv = ["memory", "--parameters", "7b", "--optimizer-states", "2", "--world", "8"]
    code = (
        f"import sys; from muster.launch.cli import main; main({argv}); "
        "sys.exit(bool({'torch', 'matplotlib', 'numpy'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, check=False).returncode == 0
