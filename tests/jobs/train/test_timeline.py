"""Timelines of a run: rows of all pipelines, by ranks of the world, on clocks that are compared again and again."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from muster.ddp.means import thread_of
from muster.ddp.primitives import ring_all_gather
from muster.jobs.runfolder.rundir import RunDir
from muster.jobs.train import timeline
from muster.jobs.train.profiling.clock import clock_for
from muster.jobs.world.world import World
from muster.launch.look.plots.lanes import timeline_plot
from muster.launch.look.timeline_view import render
from muster.launch.look.timelines import read_timeline
from muster.pipe.schedules.actions import Action
from muster.pipe.schedules.measured import Record
from muster.pipe.schedules.programs import StepSpan
from muster.pipe.schedules.tables import schedule
from muster.pipe.timeline import Offset
from support.resuming import GPT, attempt

CPU = torch.device("cpu")


def test_clocks_are_compared_again_for_they_drift(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    compared: list[Any] = []

    def clock_offsets(group: Any) -> list[Offset]:
        compared.append(group)
        return [Offset(0.0, 0.0)]

    monkeypatch.setattr(timeline, "clock_offsets", clock_offsets)
    spans = [StepSpan(Action("F", 0, 0), 0.5, 0.75), StepSpan(Action("B", 0, 0), 0.75, 1.0)]
    pipeline = SimpleNamespace(spans=spans, schedule=schedule("1f1b", 1, 4))
    engine: Any = SimpleNamespace(pipeline=pipeline, group="pipe", world=World(0, 1, None, CPU))
    recorder = timeline.PipelineRecorder(engine, tmp_path / "timeline.jsonl")
    often = []
    for step in range(2 * timeline.COMPARED + 1):
        recorder.record(step)
        often.append(len(compared))
    assert often == [1] * timeline.COMPARED + [2] * timeline.COMPARED + [3]
    assert set(compared) == {"pipe"}
    rows = [json.loads(line) for line in (tmp_path / "timeline.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(2 * timeline.COMPARED + 1))
    assert rows[0]["microbatches"] == 1  # of a short batch
    assert rows[0]["records"][1] == [0, "B", 0, 0, 0.25, 0.5]


def test_every_pipeline_has_a_row_with_ranks_of_the_world_on_the_clock_of_its_first():
    """2 data x 2 pipe x 2 tensor; the clock of rank r is r hours ahead, of which each pipeline's first rank knows."""
    table = schedule("zbv", 2, 1)
    every = [([Record(rank, "F", rank // 4, 0, 3600.0 * rank + rank // 4, 3600.0 * rank + 9)], []) for rank in range(8)]
    for first in range(4):
        every[first] = (every[first][0], [Offset(0.0, 0.0), Offset(4 * 3600.0, 0.0)])
    rows = timeline.rows_of(7, table, every, World(0, 8, None, CPU, pipe=2, tensor=2))
    assert [row["rank_of"] for row in rows] == [[rank, rank + 4, rank + 4, rank] for rank in range(4)]
    for first, row in enumerate(rows):
        assert row["records"] == [[first, "F", 0, 0, 0.0, 9.0], [first + 4, "F", 1, 0, 1.0, 9.0]]


@pytest.mark.ranks
def compare_clocks_beside_rings(world: World) -> int:
    """Compare clocks while messages of the next forward are under way, as in zero1 between hosts."""
    recorder = timeline.StepRecorder(clock_for(CPU), world, None, mode="zero1", not_timed="")
    parts = [torch.zeros(100_000) for _ in range(2)]
    ring = lambda: ring_all_gather(parts[world.rank], parts, world.group)  # noqa: E731
    sender = thread_of(world.group)
    waits = [sender.start(ring) for _ in range(20)]
    offsets = recorder._compare_clocks()
    for wait in waits:
        wait()
    return len(offsets)


def test_clocks_are_compared_after_the_messages_that_are_under_way(on_ranks):
    assert on_ranks(2, compare_clocks_beside_rings) == [2, 2]


def test_pipelines_side_by_side_are_all_recorded(on_ranks, tmp_path):
    job = {**GPT, "parallel": {"data": 2, "pipe": 2, "microbatches": 3}, "steps": 3, "log_every": 2}
    assert on_ranks(4, attempt, folder=str(tmp_path), settings=job) == [0] * 4
    found = read_timeline(RunDir(tmp_path), None, 2)
    assert found.steps == (1, 2, 3)
    assert [each.ranks for each in found.pipelines] == [(0, 2), (1, 3)]
    for each in found.pipelines:
        assert sum(record.kind in ("F", "B") for record in each.records) == 12
        assert 0.0 < each.compared.measured < 1.0
        assert {span.rank for span in each.collectives} == set(each.ranks)
        sizes = [span.bytes for span in each.collectives if span.rank == each.ranks[0]]
        assert [span.number for span in each.collectives if span.rank == each.ranks[0]] == list(range(len(sizes)))
    first, second = found.pipelines
    for place in range(2):  # both pipelines average each stage's gradients, over the same buckets
        of_both = [[span.bytes for span in one.collectives if span.rank == one.ranks[place]] for one in (first, second)]
        assert of_both[0] == of_both[1] != []
    assert "averaged over pipelines, rank" in render("t", found, first)
    kinds = {series.label for series in timeline_plot({"": first}).series}
    assert "all_reduce" in kinds
