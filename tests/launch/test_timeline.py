"""`muster timeline`: recorded steps read back, drawn, and set beside the simulated ones."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from muster.jobs.basics.files import append_line, read_lines
from muster.jobs.runfolder.rundir import RunDir
from muster.jobs.train.timeline import row_of
from muster.launch import cli
from muster.launch.common.storage import Courier
from muster.pipe.schedules.costs import Costs
from muster.pipe.schedules.measured import Record
from muster.pipe.schedules.messages import with_messages
from muster.pipe.schedules.simulate import simulate
from muster.pipe.schedules.tables import schedule


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "pipe-20260101T000000.000Z-abcdef")
    made.path.mkdir()
    (made.path / "events.jsonl").write_text("")
    return made


def record(
    run: RunDir,
    step: int,
    name: str = "1f1b",
    *,
    attempt: int = 0,
    microbatches: int = 4,
    late_s: float = 0.0,
    ranks: tuple[int, int] = (0, 1),
) -> None:
    """Leave what two ranks did in a step in which the last action to end was late."""
    table = schedule(name, 2, microbatches)
    spans = simulate(with_messages(table), Costs(0.001, 0.002, 0.001, 0.0)).spans
    records = [
        Record(rank, span.step.kind, span.step.stage, span.step.microbatch, span.start_s, span.end_s)
        for rank, row in enumerate(spans)
        for span in row
    ]
    records += [Record(1, "wait", 1, 0, 0.0, records[0].end_s), Record(0, "send", 1, 0, 0.001, 0.001)]
    last = max(each.end_s for each in records)
    records = [replace(each, end_s=each.end_s + late_s) if each.end_s == last else each for each in records]
    records = [replace(each, rank=ranks[each.rank]) for each in records]
    run.attempt(attempt).path.mkdir(exist_ok=True)
    append_line(run.attempt(attempt).timeline, row_of(step, replace(table, microbatches=8), ranks, records))


def shown(capsys: Any, run: RunDir, *more: str) -> str:
    assert cli.main(["timeline", str(run.path), *more]) == 0
    out: str = capsys.readouterr().out
    return out


def test_the_newest_step_is_drawn_with_its_bubble_beside_the_simulated_one(capsys, run):
    record(run, 10)
    record(run, 20, late_s=0.002)
    out = shown(capsys, run)
    assert "attempt 0, step 20: 1f1b, 2 ranks, 4 micro-batches" in out
    assert [line.split()[0:2] for line in out.splitlines() if line.startswith("rank")] == [["rank", "0"], ["rank", "1"]]
    (bubbles,) = (line for line in out.splitlines() if line.startswith("bubble"))
    assert bubbles.endswith("20.0 % by the formula for equal stages")
    measured, simulated = (float(word) for word in bubbles.split()[1:6:3])
    assert (measured > 20.5, simulated) == (True, pytest.approx(20.0, abs=2.5))


def test_a_step_is_chosen_and_told_as_data(capsys, run):
    record(run, 10)
    record(run, 20, "zbv")
    record(run, 10, "gpipe", attempt=1)
    told = json.loads(shown(capsys, run, "--step", "20", "--json"))
    assert (told["attempt"], told["step"], told["schedule"], told["recorded"]) == (0, 20, "zbv", [10, 20])
    assert told["bubble"] == pytest.approx(told["simulated_bubble"], abs=1e-6)
    assert {each["kind"] for each in told["records"]} == {"F", "I", "W", "send", "wait"}
    assert json.loads(shown(capsys, run, "--json"))["schedule"] == "gpipe", "the newest attempt"
    assert json.loads(shown(capsys, run, "--json", "--attempt", "0"))["schedule"] == "zbv"


def test_of_several_pipelines_the_slowest_is_drawn_by_ranks_of_the_world_and_others_by_rank(capsys, run, tmp_path):
    record(run, 10, ranks=(0, 2))
    record(run, 10, ranks=(1, 3), late_s=0.003)
    out, drawing = shown(capsys, run, "--svg", str(tmp_path / "step.svg")), tmp_path / "step.svg"
    lines = [re.split(r"\s{2,}", line.strip()) for line in out.splitlines()]
    assert "2 ranks, 4 micro-batches; the slowest of 2 pipelines" in out
    assert [line[0] for line in lines if line[0].startswith("rank")] == ["rank 1", "rank 3"]
    assert [line[:2] for line in lines if line[0] in ("0", "1")] == [["0", "1"], ["1", "3"]]  # stages and their ranks
    assert lines[-2:] == [
        ["0 2", "20 ms", "20.0 %", "16 ms, 16 ms"],
        ["1 3", "23 ms", "23.9 %", "19 ms, 16 ms"],  # rank 1 is slower than rank 0, which has the same stage
    ]
    assert "rank 3: F1.0" in drawing.read_text()
    told = json.loads(shown(capsys, run, "--rank", "2", "--json"))
    assert {each["rank"] for each in told["records"]} == set(told["rank_of"]) == {0, 2}
    assert [each["ranks"] for each in told["pipelines"]] == [[0, 2], [1, 3]]
    assert [each["makespan_s"] for each in told["pipelines"]] == pytest.approx([0.020, 0.023])
    assert "one of 2 pipelines" in shown(capsys, run, "--rank", "0")
    assert cli.main(["timeline", str(run.path), "--rank", "4"]) == 72
    assert "step 10: rank 4 was not recorded; recorded ranks: 0, 1, 2, 3" in capsys.readouterr().err
    assert cli.main(["timeline", str(run.path), "--rank", "-1"]) == 2


def test_why_a_measured_bubble_is_not_the_simulated_one_is_said_where_they_differ(capsys, run):
    record(run, 10)
    assert "they differ" not in shown(capsys, run)
    record(run, 20, late_s=0.006)
    assert (
        "they differ: the simulation uses the mean time of each kind and stage, but actions took 0.67 to 2 times"
        in (shown(capsys, run))
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {"rank_of": [0, 0]},
        {"rank_of": ["a", "b"]},
        {"rank_of": [float("inf")]},
        {"microbatches": 10**12},
        {"chunks": 10**9, "schedule": "interleaved"},
        {"records": [[0, "F", 0, 0, 0.0, 1.0]]},
        {"records": [[9, "F", 0, 0, 0.0, 1.0]]},
    ],
)
def test_a_row_that_makes_no_step_is_left_out(capsys, run, wrong):
    record(run, 10)
    (row,) = read_lines(run.attempt(0).timeline)
    append_line(run.attempt(0).timeline, {**row, "step": 11, **wrong})
    assert "step 10" in shown(capsys, run)


def test_a_short_batch_is_a_step_of_fewer_micro_batches(capsys, run):
    record(run, 3, "interleaved", microbatches=3)
    assert json.loads(shown(capsys, run, "--json"))["microbatches"] == 3


def test_it_is_drawn_into_a_file(capsys, run, tmp_path):
    record(run, 7)
    shown(capsys, run, "--svg", str(tmp_path / "step.svg"))
    drawing = (tmp_path / "step.svg").read_text()
    assert drawing.startswith("<svg")
    assert "attempt 0, step 7</text>" in drawing
    assert ">1f1b, 2 ranks, 4 micro-batches; 20 ms, bubble 20.0 % measured" in drawing
    assert cli.main(["timeline", str(run.path), "--svg", str(tmp_path / "nowhere" / "step.svg")]) == 73
    assert capsys.readouterr().err.endswith("step.svg: cannot be written: no such file or directory\n")


def test_what_is_not_there_is_said(capsys, run):
    assert cli.main(["timeline", str(run.path)]) == 72
    assert "no timeline is recorded; training records one at log points" in capsys.readouterr().err
    record(run, 10)
    with run.attempt(0).timeline.open("a") as file:
        file.write('{"step": 30, "schedule": "1f1b"}\n{"step": 40')  # torn, and another version's
    assert "step 10" in shown(capsys, run)
    assert cli.main(["timeline", str(run.path), "--step", "11"]) == 72
    assert "step 11 was not recorded; recorded steps: 10" in capsys.readouterr().err
    assert cli.main(["timeline", str(run.path), "--step", "0"]) == 2


def test_a_node_with_the_first_rank_sends_it_home(run):
    record(run, 10)
    of_first, of_second = (Courier(run, run.attempt(0), node=rank, ranks=[rank]).files for rank in (0, 1))
    assert run.attempt(0).timeline in of_first
    assert run.attempt(0).timeline not in of_second
