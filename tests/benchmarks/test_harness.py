"""The harness of the benchmarks: options, turns, ratios, records, commands and ranks."""

import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))  # ranks import this file without its conftest

import harness
import ranks

pytestmark = pytest.mark.command


def test_sides_take_turns_and_the_first_rounds_are_dropped():
    called: list[str] = []
    sides = {name: lambda name=name: called.append(name) or len(called) for name in "abc"}
    found = harness.turns(sides, 2, warm_up=1)
    assert "".join(called) == "cba" + "abc" + "cba"
    assert found == {"a": [4, 9], "b": [5, 8], "c": [6, 7]}


def test_a_row_has_the_median_of_the_paired_ratios_and_the_record_all_rows(tmp_path, capsys):
    row = harness.compare("start", [1.0, 3.0, 2.0], [2.0, 3.0, 1.0], reach=1.0)
    assert (row["ratio"], row["ratios"], row["reached"]) == (1.0, [0.5, 1.0, 2.0], True)
    args = harness.Options("", repeats=9, quick={"repeats": 3}).parse_args(["--quick", "--json", str(tmp_path / "r")])
    assert args.repeats == 3
    assert harness.finish(args, "starts", [row, {"reached": False}], nodes=2) == 1
    assert "1 of 2 rows in reach, all of it: NO" in capsys.readouterr().out
    record = json.loads((tmp_path / "r").read_text())
    assert (record["benchmark"], record["reached"], record["nodes"], len(record["rows"])) == ("starts", False, 2, 2)
    assert harness.finish(harness.Options("").parse_args([]), "nothing", []) == 1  # nothing was measured
    harness.table(["side", "ms"], [["ours", "9.1"], ["theirs", "10.2"]])
    assert capsys.readouterr().out.endswith("side      ms\nours     9.1\ntheirs  10.2\n")


def test_blocks_are_compared_by_clock_and_step():
    found = harness.by_clock([(2.0, 4.0)], [(4.0, 4.0)], steps=2)
    assert (found["cpu"]["ratio"], found["cpu"]["ours"], found["wall"]["ratio"]) == (0.5, [1.0], 1.0)


def test_the_clock_of_a_command_stops_at_a_line_and_a_failure_is_told(monkeypatch):
    readings = itertools.count()
    monkeypatch.setattr(harness, "perf_counter", lambda: next(readings))  # at the start, at the line, at the end
    ran = harness.command(["sh", "-c", "echo begun; echo met; echo more"], until="met")
    assert ran.out == "begun\nmet\nmore\n"
    assert (ran.seconds, next(readings)) == (1, 3)
    for line, until in (("echo no; echo why >&2; exit 3", ""), ("echo never", "met")):
        with pytest.raises(SystemExit, match="no\nwhy" if not until else "never"):
            harness.command(["sh", "-c", line], until=until)


def measure(scale: float) -> list[float]:
    return [each * scale for each in ranks.most(float(os.environ["RANK"]), -float(os.environ["RANK"]))]


def talk(fail: bool) -> None:
    ranks.say("row", ranks=int(os.environ["WORLD_SIZE"]))
    print("not JSON", flush=True)
    if fail and os.environ["RANK"] == "0":
        raise SystemExit(3)


def broken() -> None:
    raise SystemExit("no")


@pytest.mark.ranks
@pytest.mark.slow
def test_ranks_call_a_function_of_a_script_and_what_rank_0_says_is_heard(capsys):
    with ranks.place(2) as where:
        assert ranks.on_ranks(measure, where, scale=2.0) == [2.0, 0.0]
    with pytest.raises(SystemExit, match="ranks ended with"):
        ranks.on_ranks(broken, 1)
    row: dict[str, Any] = {"say": "row", "ranks": 2}
    assert list(ranks.hear(talk, 2, limit_s=60.0, fail=False)) == [row]
    assert "| not JSON" in capsys.readouterr().out
    *heard, failed = ranks.hear(talk, 2, limit_s=60.0, fail=True)
    assert (heard, failed["say"]) == ([row], "failed")
    assert "3" in failed["why"]
