"""Simulate a program: its duration, the idle time of its ranks, and the activations they hold."""

from collections.abc import Iterator
from dataclasses import dataclass

from muster.pipe.schedules.actions import Action
from muster.pipe.schedules.costs import Costs as Costs
from muster.pipe.schedules.programs import Program, StepSpan
from muster.pipe.schedules.tables import SCHEDULES
from muster.pipe.schedules.times import times


@dataclass(frozen=True)
class Simulated:
    """The result of a simulation.

    `spans[rank]` are a rank's actions with their times; `messages[rank]` are its sends, from departure to arrival.
    `bubble` is the idle share of all ranks' time, from the first start to the last end on any rank.
    `bubble_without_barrier` is the idle share if ranks do not wait for each other between steps. The length of a step
    is then measured on each rank, from its first start to its last end, and the longest one counts. An activation is
    in flight from the start of its forward to the end of its backward (W if split); `peak_in_flight` is the maximum on
    each rank.
    """

    spans: tuple[tuple[StepSpan, ...], ...]
    messages: tuple[tuple[StepSpan, ...], ...]
    makespan_s: float
    bubble: float
    bubble_without_barrier: float
    peak_in_flight: tuple[int, ...]


def simulate(program: Program, costs: Costs | None = None) -> Simulated:
    """Run a program in simulated time. Every action begins when its rank is free and its inputs have arrived.

    A message leaves when its producer ends, and travels while ranks compute. Messages between two ranks do not overlap.

    Raises:
        ScheduleError: If the ranks deadlock.
        ValueError: If the costs are for another number of stages.
    """
    costs = costs or Costs()
    costs.require(program.schedule.stages)
    orders = tuple(tuple(step for step in row if isinstance(step, Action)) for row in program.steps)
    found = times(program.schedule.rank_of, orders, costs)
    spans = tuple(
        tuple(StepSpan(action, start, end) for action, (start, end) in zip(order, row, strict=True))
        for order, row in zip(orders, found.actions, strict=True)
    )
    makespan_s = max((row[-1].end_s for row in spans if row), default=0.0)
    return Simulated(
        spans=spans,
        messages=tuple(tuple(StepSpan(send, *when) for send, when in row) for row in found.messages),
        makespan_s=makespan_s,
        bubble=_share(sum(_busy(row) for row in spans), len(spans) * makespan_s),
        bubble_without_barrier=_without_barrier(spans),
        peak_in_flight=tuple(max(_in_flight(row), default=0) for row in orders),
    )


def bubble_formula(name: str, ranks: int, microbatches: int, chunks: int = 2) -> float:
    """Return the idle share of a step by formula, for equal stages, F = I = W and free messages."""
    return SCHEDULES[name].bubble(ranks, microbatches, chunks)


def _busy(row: tuple[StepSpan, ...]) -> float:
    return sum(span.end_s - span.start_s for span in row)


def _share(busy_s: float, whole_s: float) -> float:
    return max(0.0, 1 - busy_s / whole_s) if whole_s else 0.0


def _without_barrier(spans: tuple[tuple[StepSpan, ...], ...]) -> float:
    longest = max((row[-1].end_s - row[0].start_s for row in spans if row), default=0.0)
    return _share(sum(_busy(row) for row in spans), len(spans) * longest)


def _in_flight(order: tuple[Action, ...]) -> Iterator[int]:
    held = 0
    for action in order:
        held += (action.kind == "F") - (action.kind in "BW")
        yield held
