"""The cost model's benchmark on drawn clusters: what it prints, and when it says that something is out of reach."""

import json
from pathlib import Path

import cost_model
import pytest

from collectives_bench.records import Result
from collectives_bench.results.files import write_result
from support.costs import OnLinks, OnOneHost, drawn

OPERATIONS = ("all_reduce", "broadcast", "all_to_all")


def printed(result: Result, reach: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str], dict[str, object]]:
    code = cost_model.report(result, "drawn", reach)
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


def test_without_three_worlds_none_is_left_out_and_the_reach_is_missed(capsys) -> None:
    code, _, record = printed(drawn(OnLinks, OPERATIONS, worlds=(2, 3), noise=0.0), "box", capsys)
    assert (code, record["held_out_worlds"]) == (1, None)


def test_results_measured_before_are_read_from_their_files(tmp_path: Path, monkeypatch, capsys) -> None:
    paths = [tmp_path / f"{ranks}.json" for ranks in (2, 3, 4)]
    for ranks, path in zip((2, 3, 4), paths, strict=True):
        write_result(drawn(OnLinks, OPERATIONS, worlds=(ranks,), noise=0.0), path)
    monkeypatch.setattr("sys.argv", ["cost_model.py", *map(str, paths)])
    assert cost_model.main() == 0
    assert "file: 9 curves" in capsys.readouterr().out
