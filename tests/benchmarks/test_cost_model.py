"""The cost model's benchmark on drawn clusters: what it prints, and when it says that something is out of reach."""

import json
from argparse import Namespace
from pathlib import Path

import cost_model
import pytest

from muster.collectives_bench.records import Result
from muster.collectives_bench.results.files import write_result
from support.costs import OnLinks, OnOneHost, drawn

pytestmark = [pytest.mark.command, pytest.mark.slow]

OPERATIONS = ("all_reduce", "broadcast", "all_to_all")


def printed(result: Result, reach: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str], dict[str, object]]:
    code = cost_model.report(result, "drawn", reach, Namespace(json=None))
    lines = capsys.readouterr().out.splitlines()
    return code, lines, json.loads(lines[-1])


def test_a_cluster_that_follows_the_formulas_is_in_reach(capsys) -> None:
    code, lines, record = printed(drawn(OnLinks, OPERATIONS, noise=0.02), "box", capsys)
    assert (code, record["reached"]) == (0, True)
    assert "  reach: sizes: mean 5 %: yes" in lines
    assert sum(line.startswith("  4 on 4 ") for line in lines) == 1


def test_a_noisy_one_is_not(capsys) -> None:
    code, lines, record = printed(drawn(OnOneHost, OPERATIONS, noise=0.6), "loopback", capsys)
    assert (code, record["reached"]) == (1, False)
    assert "  reach: sizes: median 8 %: NO" in lines


@pytest.mark.parametrize(
    ("reach", "missing"), [("box", "worlds: mean 10 %"), ("loopback", "largest world from the others: mean 15 %")]
)
@pytest.mark.parametrize("worlds", [(2,), (2, 3)])
def test_without_three_worlds_none_is_left_out_and_the_reach_is_not_measured(
    worlds: tuple[int, ...], reach: str, missing: str, capsys
) -> None:
    code, lines, record = printed(drawn(OnLinks, OPERATIONS, worlds=worlds, noise=0.0), reach, capsys)
    assert (code, record["held_out_worlds"], record["reached"]) == (0, None, None)
    assert record["not_measured"] == [missing]
    assert f"  reach: {missing}: not measured" in lines


def test_worlds_on_one_node_and_on_several_are_left_out_apart(capsys) -> None:
    both = [drawn(truth, OPERATIONS, worlds=(2, 3, 4), noise=0.0) for truth in (OnLinks, OnOneHost)]
    mixed = Result(headers=both[0].headers + both[1].headers, blocks=both[0].blocks + both[1].blocks)
    _, lines, _ = printed(mixed, "box", capsys)
    assert sum(line.startswith(("  4 on 4 ", "  4 on 1 ")) for line in lines) == 2


def test_only_worlds_that_the_gpus_allow_are_measured(capsys) -> None:
    assert [cost_model.fitting("2,3,4", gpus) for gpus in (2, 3, 8)] == ["2", "2,3", "2,3,4"]
    assert "2 GPUs are visible here: worlds of 2,3,4 become [2]" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="1 GPUs are visible here, 2 or more are needed"):
        cost_model.fitting("2,3,4", 1)


def test_results_measured_before_are_read_from_their_files(tmp_path: Path, monkeypatch, capsys) -> None:
    paths = [tmp_path / f"{ranks}.json" for ranks in (2, 3, 4)]
    for ranks, path in zip((2, 3, 4), paths, strict=True):
        write_result(drawn(OnLinks, OPERATIONS, worlds=(ranks,), noise=0.0), path)
    monkeypatch.setattr("sys.argv", ["cost_model.py", *map(str, paths)])
    assert cost_model.main() == 0
    assert "file: 9 curves" in capsys.readouterr().out
