"""Spans of all ranks on one clock, even if their own clocks are far apart."""

import time
from dataclasses import astuple
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from muster.jobs.world.world import World
from muster.pipe import Pipeline
from muster.pipe.schedules.actions import Action
from muster.pipe.schedules.measured import Record
from muster.pipe.schedules.programs import Receive, Send, StepSpan
from muster.pipe.schedules.tables import schedule
from muster.pipe.timeline import Offset, clock_offsets, gather, offsets_by_meetings, on_one_clock

pytestmark = pytest.mark.ranks

AHEAD_S = 1000.0  # difference between the clocks of consecutive ranks


def baton(world: World) -> list[Any]:
    """Let the ranks work one after another; return what rank 0 gathers, and the true order."""

    def clock() -> float:
        return time.monotonic() + AHEAD_S * world.rank

    offsets = clock_offsets(pings=5, clock=clock)
    token = torch.zeros(1)
    if world.rank:
        dist.recv(token, world.rank - 1)
    began, step = clock(), Action("F", world.rank, 7)
    spans = [StepSpan(Receive("activation", world.rank, 7, 0), began - 5, began - 4), StepSpan(step, began, began + 3)]
    spans.append(StepSpan(Send("activation", world.rank + 1, 7, 1), began + 1, began + 2))
    if world.rank + 1 < world.size:
        dist.send(token, world.rank + 1)
    half = dist.new_group([1, 2])
    records = gather(spans, offsets=offsets)
    some = gather(spans, half) if world.rank in (1, 2) else None
    truth: list[Any] = [None] * world.size
    dist.all_gather_object(truth, began - AHEAD_S * world.rank)
    return [
        [astuple(each) for each in offsets],
        None if records is None else [astuple(each) for each in records],
        None if some is None else [each.rank for each in some],
        truth,
    ]


def shifted(world: World) -> list[Any]:
    """Compare clocks that are far apart, in meetings."""
    offsets = offsets_by_meetings(clock=lambda: time.monotonic() + AHEAD_S * world.rank)
    return [astuple(each) for each in offsets]


def test_meetings_bound_how_far_clocks_are_off_and_tell_every_rank(on_ranks: Any):
    told = on_ranks(3, shifted)
    assert told[0] == told[1] == told[2]
    assert told[0][0] == [0.0, 0.0]
    for rank, (offset, uncertainty) in enumerate(told[0]):
        assert abs(offset - AHEAD_S * rank) <= uncertainty + 1e-9  # all clocks are this machine's
        assert uncertainty < AHEAD_S / 4


def test_clocks_a_thousand_seconds_apart_are_one_clock_within_what_the_pings_allow(on_ranks: Any):
    offsets, rows, _, truth = on_ranks(3, baton)[0]
    for rank, (offset, uncertainty) in enumerate(offsets):
        assert abs(offset - AHEAD_S * rank) <= uncertainty + 1e-9  # at most half a round trip, whatever the delays
        assert uncertainty < AHEAD_S / 4
    records = [Record(*row) for row in rows]
    forwards = [each for each in records if each.kind == "F"]
    assert sorted((each.rank, each.stage, each.microbatch) for each in forwards) == [
        (rank, rank, 7) for rank in range(3)
    ]
    for each in forwards:
        error = abs(each.start_s - (truth[each.rank] - truth[0]))
        assert error <= 2 * max(uncertainty for _, uncertainty in offsets) + 1e-6
        assert each.end_s - each.start_s == pytest.approx(3.0)
    assert [each.kind for each in records].count("wait") == [each.kind for each in records].count("send") == 3


def test_only_rank_0_of_the_group_has_the_records_and_ranks_are_counted_in_the_group(on_ranks: Any):
    found = on_ranks(3, baton)
    assert [each[1] is not None for each in found] == [True, False, False]
    assert [each[2] and sorted(each[2]) for each in found] == [None, [0, 0, 0, 1, 1, 1], None]


def test_records_count_from_the_first_start_of_an_action_and_lie_in_order():
    rows = [
        [Record(0, "F", 0, 0, 100.0, 101.0), Record(0, "send", 1, 0, 101.0, 101.5)],
        [Record(1, "wait", 1, 0, 598.0, 601.0), Record(1, "F", 1, 0, 601.5, 602.0)],
    ]
    records = on_one_clock(rows, [Offset(0.0, 0.0), Offset(500.0, 0.1)])
    assert [(each.rank, each.kind, each.start_s, each.end_s) for each in records] == [
        (1, "wait", -2.0, 1.0),
        (0, "F", 0.0, 1.0),
        (0, "send", 1.0, 1.5),
        (1, "F", 1.5, 2.0),
    ]


def test_a_process_without_a_group_is_alone():
    assert clock_offsets() == [Offset(0.0, 0.0)]
    records = gather([StepSpan(Action("F", 0, 0), 50.0, 51.0)])
    assert records == [Record(0, "F", 0, 0, 0.0, 1.0)]


class Counting:
    """A clock whose marks are plain numbers, converted to seconds on demand."""

    def __init__(self) -> None:
        self.made, self.asked = 0, 0

    def now(self) -> int:
        self.made += 1
        return self.made

    def seconds(self, marks: list[int]) -> list[float]:
        self.asked += 1
        return [10.0 * each for each in marks]


def test_marks_of_a_step_become_seconds_once_and_only_for_who_reads_them():
    pipeline = Pipeline(nn.Sequential(nn.Linear(2, 1)), schedule("gpipe", 1, 3), loss=lambda output, _: output.mean())
    assert pipeline.spans == []
    clock = pipeline._marks = Counting()  # type: ignore[assignment]
    for _ in range(2):
        pipeline.step(torch.ones(6, 2), torch.ones(6))
    assert clock.asked == 0
    found = [(str(each.step), each.start_s, each.end_s) for each in pipeline.spans]
    names = ["F0.0", "F0.1", "F0.2", "B0.0", "B0.1", "B0.2"]
    assert found == [(name, 10.0 * (8 + place), 10.0 * (9 + place)) for place, name in enumerate(names)]
    pipeline.evaluate(torch.ones(4, 2))
    assert [each.end_s for each in pipeline.spans] == [end for *_, end in found]
    assert clock.asked == 1


def refused(world: World) -> str:
    with pytest.raises(ValueError, match="found 1; expected one for each of 2 ranks") as caught:
        gather([], offsets=[Offset(0.0, 0.0)])
    return str(caught.value)


def test_offsets_of_another_number_of_ranks_are_refused(on_ranks: Any):
    assert len(on_ranks(2, refused)) == 2
