"""What ranks really did in a step, as records: their bubble, what actions cost, and the same step simulated.

A record says which rank did what from when to when, on one clock, in seconds from the step's first start:

    {"rank": 2, "kind": "F", "stage": 2, "microbatch": 0, "start_s": 0.0205, "end_s": 0.0307}

Kinds are those of actions (F, B, I, W), `send` and `wait`, the time in which a rank stands and waits for a message; a
message's stage is the one it is for. `pipe/timeline.py` gathers them.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from muster.pipe.schedules.actions import Action, Kind, Schedule
from muster.pipe.schedules.costs import Costs
from muster.pipe.schedules.draw import COMPUTE, Bar
from muster.pipe.schedules.messages import with_messages
from muster.pipe.schedules.programs import received_before
from muster.pipe.schedules.simulate import Simulated, simulate
from muster.pipe.schedules.times import needs


@dataclass(frozen=True)
class Record:
    """What a rank did, or a message of its, from when to when."""

    rank: int
    kind: str
    stage: int
    microbatch: int
    start_s: float
    end_s: float

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return asdict(self)

    @property
    def action(self) -> Action:
        """The action that this is a record of; a message is none."""
        assert self.kind in COMPUTE
        kind: Kind = self.kind  # type: ignore[assignment]
        return Action(kind, self.stage, self.microbatch)


@dataclass(frozen=True)
class Compared:
    """A measured step beside the simulated one of the same costs."""

    measured: float  # bubbles: shares of all ranks' time, 0 to 1
    simulated: float
    costs: Costs  # the measured means
    simulation: Simulated


def bars(records: Iterable[Record], rank_of: Sequence[int]) -> list[list[Bar]]:
    """Return records as rows to be drawn, as simulated spans are: one a rank, in order of time."""
    rows: list[list[Bar]] = [[] for _ in range(1 + max(rank_of))]
    for each in sorted(records, key=lambda each: each.start_s):
        kind = "receive" if each.kind == "wait" else each.kind
        # A message belongs to no stage of its rank: its number is that of the stage it is for.
        chunk = rank_of[: each.stage].count(each.rank) if each.kind in COMPUTE else 0
        rows[each.rank].append(Bar(kind, each.stage, each.microbatch, each.start_s, each.end_s, chunk))
    return rows


def bubble(records: Iterable[Record], ranks: int) -> float:
    """Return the share of the ranks' time, from the first start to the last end of any action, in which none runs.

    0 to 1, as in `Simulated`; 0 without records. Actions of a rank that overlap count once.
    """
    actions = [each for each in records if each.kind in COMPUTE]
    if not actions:
        return 0.0
    whole_s = max(each.end_s for each in actions) - min(each.start_s for each in actions)
    return max(0.0, 1 - sum(busy_s(actions, ranks)) / (ranks * whole_s)) if whole_s else 0.0


def busy_s(records: Iterable[Record], ranks: int) -> tuple[float, ...]:
    """Return for how many seconds each rank computed; actions that overlap count once."""
    rows: list[list[tuple[float, float]]] = [[] for _ in range(ranks)]
    for each in records:
        if each.kind in COMPUTE:
            rows[each.rank].append((each.start_s, each.end_s))
    return tuple(map(_covered, rows))


def spread(records: Iterable[Record]) -> tuple[float, float]:
    """Return how long the shortest and the longest action took, of the mean of its kind and stage; 1 and 1 of none."""
    took = _took(records)
    shares = [each / mean for seconds in took.values() if (mean := fmean(seconds)) for each in seconds]
    return min(shares, default=1.0), max(shares, default=1.0)


def mean_costs(steps: Sequence[Sequence[Record]], schedule: Schedule) -> Costs:
    """Return what actions of every stage and messages of every cut took, as means over steps of one schedule.

    A message takes from its maker's end to its consumer's start, judged only where the consumer's rank had nothing else
    to do by then; of those the median, for a rank that was held up is no message. A cut of which none was waited for
    has the least of what they took at most. Of a stage whose backward was in one piece, all is `input_gradient`.

    Raises:
        ValueError: an action was not recorded.
    """
    stages = range(schedule.stages)
    took = _took(each for records in steps for each in records)
    kinds = {action.kind for row in schedule.actions for action in row}
    missing = [f"{kind}{stage}" for kind in sorted(kinds) for stage in stages if not took[kind, stage]]
    if missing:
        raise ValueError(
            f"records: none of {', '.join(missing)}; wanted every action of {schedule.name!r}, of all ranks"
        )
    means = {key: fmean(seconds) for key, seconds in took.items() if seconds}
    inputs = tuple(means["I", stage] if ("I", stage) in means else means["B", stage] for stage in stages)
    weights = tuple(means.get(("W", stage), 0.0) for stage in stages)
    messages = _messages(steps, schedule)
    sends, takes = _handling(steps, schedule, messages)
    return Costs(tuple(means["F", stage] for stage in stages), inputs, weights, messages, sends, takes)


def _took(records: Iterable[Record]) -> dict[tuple[str, int], list[float]]:
    """Return the seconds of all actions, by kind and stage."""
    took: dict[tuple[str, int], list[float]] = defaultdict(list)
    for each in records:
        if each.kind in COMPUTE:
            took[each.kind, each.stage].append(each.end_s - each.start_s)
    return took


def compare(steps: Sequence[Sequence[Record]], schedule: Schedule) -> Compared:
    """Set the mean bubble of recorded steps beside that of the schedule, simulated with their mean costs.

    Raises:
        ValueError: as `mean_costs`.
    """
    costs = mean_costs(steps, schedule)
    simulation = simulate(with_messages(schedule), costs)
    measured = fmean(bubble(records, schedule.ranks) for records in steps)
    return Compared(measured, simulation.bubble, costs, simulation)


def _messages(steps: Sequence[Sequence[Record]], schedule: Schedule) -> tuple[float, ...]:
    """Return the seconds of a message over every cut."""
    waited: list[list[float]] = [[] for _ in range(schedule.stages - 1)]
    at_most: list[list[float]] = [[] for _ in range(schedule.stages - 1)]
    for records in steps:
        found = {each.action: each for each in records if each.kind in COMPUTE}
        for row in schedule.actions:
            free_s = 0.0
            for action in row:
                record = found.get(action)
                if record is None:
                    continue
                message = received_before(action, schedule.rank_of)
                maker = found.get(_maker(action, schedule)) if message else None
                if maker is not None:
                    cut = min(action.stage, maker.stage)
                    took = max(0.0, record.start_s - maker.end_s)
                    (waited if free_s <= maker.end_s else at_most)[cut].append(took)
                free_s = record.end_s
    return tuple(median(some) if some else min(other, default=0.0) for some, other in zip(waited, at_most, strict=True))


def _handling(
    steps: Sequence[Sequence[Record]], schedule: Schedule, messages: Sequence[float]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the seconds of every stage's rank to send what it made, and to take what is there for it."""
    sends: list[list[float]] = [[] for _ in range(schedule.stages)]
    takes: list[list[float]] = [[] for _ in range(schedule.stages)]
    for records in steps:
        found = {each.action: each for each in records if each.kind in COMPUTE}
        rows: list[list[Record]] = [[] for _ in schedule.actions]
        for each in sorted(records, key=lambda each: each.start_s):
            rows[each.rank].append(each)
        for row in rows:
            for before, each in pairwise(row):
                if each.kind == "send" and before.kind in COMPUTE:
                    sends[before.stage].append(each.end_s - each.start_s)
                elif before.kind == "wait" and each.kind in COMPUTE and received_before(each.action, schedule.rank_of):
                    maker = found[_maker(each.action, schedule)]
                    if maker.end_s + messages[min(maker.stage, each.stage)] <= before.start_s:
                        takes[each.stage].append(before.end_s - before.start_s)
    return tuple(median(some or [0.0]) for some in sends), tuple(median(some or [0.0]) for some in takes)


def _maker(action: Action, schedule: Schedule) -> Action:
    """Return the action whose result this one gets from another rank."""
    return next(each for each in needs(action, schedule.stages) if each.stage != action.stage)


def _covered(spans: list[tuple[float, float]]) -> float:
    """Return how long at least one span lasts."""
    covered_s, until_s = 0.0, float("-inf")
    for start, end in sorted(spans):
        covered_s += max(0.0, end - max(start, until_s))
        until_s = max(until_s, end)
    return covered_s
