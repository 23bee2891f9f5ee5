"""Records of a measured step: its bubble, the costs of its actions, and a simulation with the same costs.

A record is one action or message of a rank, with times on one clock, in seconds from the step's first start:

    {"rank": 2, "kind": "F", "stage": 2, "microbatch": 0, "start_s": 0.0205, "end_s": 0.0307}

Kinds are those of actions (F, B, I, W), `send`, and `wait`: the time in which a rank blocks on a message. The stage of
a message is its destination. `pipe/timeline.py` gathers the records.
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
    """An action of a rank or one of its messages, with its start and end."""

    rank: int
    kind: str
    stage: int
    microbatch: int
    start_s: float
    end_s: float

    def as_dict(self) -> dict[str, Any]:
        """Return the record as a dictionary for JSON."""
        return asdict(self)

    @property
    def action(self) -> Action:
        """The recorded action. A message's record has no action."""
        assert self.kind in COMPUTE
        kind: Kind = self.kind  # type: ignore[assignment]
        return Action(kind, self.stage, self.microbatch)


@dataclass(frozen=True)
class Compared:
    """A measured step and a simulated one with the same costs."""

    measured: float  # bubbles: idle share of all ranks' time, 0 to 1
    simulated: float
    costs: Costs  # means of actions, medians of messages
    simulation: Simulated


def bars(records: Iterable[Record], rank_of: Sequence[int]) -> list[list[Bar]]:
    """Convert records to rows of bars for drawing, one row per rank, in order of time."""
    rows: list[list[Bar]] = [[] for _ in range(1 + max(rank_of))]
    for each in sorted(records, key=lambda each: each.start_s):
        kind = "receive" if each.kind == "wait" else each.kind
        # A message is drawn in the rank's first chunk; `stage` is its destination.
        chunk = rank_of[: each.stage].count(each.rank) if each.kind in COMPUTE else 0
        rows[each.rank].append(Bar(kind, each.stage, each.microbatch, each.start_s, each.end_s, chunk))
    return rows


def bubble(records: Iterable[Record], ranks: int) -> float:
    """Return the idle share of the ranks' time, from the first start to the last end of any action.

    The result is between 0 and 1, as in `Simulated`, and 0 without records. Overlapping actions of a rank count once.
    """
    actions = [each for each in records if each.kind in COMPUTE]
    if not actions:
        return 0.0
    whole_s = max(each.end_s for each in actions) - min(each.start_s for each in actions)
    return max(0.0, 1 - sum(busy_s(actions, ranks)) / (ranks * whole_s)) if whole_s else 0.0


def busy_s(records: Iterable[Record], ranks: int) -> tuple[float, ...]:
    """Return how many seconds each rank computed. Overlapping actions count once."""
    rows: list[list[tuple[float, float]]] = [[] for _ in range(ranks)]
    for each in records:
        if each.kind in COMPUTE:
            rows[each.rank].append((each.start_s, each.end_s))
    return tuple(map(_covered, rows))


def spread(records: Iterable[Record]) -> tuple[float, float]:
    """Return the smallest and largest ratio of an action's duration to the mean for its kind and stage."""
    took = _took(records)
    shares = [each / mean for seconds in took.values() if (mean := fmean(seconds)) for each in seconds]
    return min(shares, default=1.0), max(shares, default=1.0)


def mean_costs(steps: Sequence[Sequence[Record]], schedule: Schedule) -> Costs:
    """Return the costs of a schedule over recorded steps: means of actions per stage, medians of messages per cut.

    A message lasts from its producer's end to its consumer's start. A message counts only if the consumer's rank was
    already idle when the producer ended. The median is used because some consumers start late for other reasons. For a
    cut without such messages, the shortest other message is used, as an upper bound. `input_gradient` is the cost of a
    whole backward.

    Raises:
        ValueError: If an action was not recorded.
    """
    stages = range(schedule.stages)
    took = _took(each for records in steps for each in records)
    kinds = {action.kind for row in schedule.actions for action in row}
    missing = [f"{kind}{stage}" for kind in sorted(kinds) for stage in stages if not took[kind, stage]]
    if missing:
        raise ValueError(f"records lack {', '.join(missing)}; expected every action of {schedule.name!r}, on all ranks")
    means = {key: fmean(seconds) for key, seconds in took.items() if seconds}
    inputs = tuple(means["I", stage] if ("I", stage) in means else means["B", stage] for stage in stages)
    weights = tuple(means.get(("W", stage), 0.0) for stage in stages)
    messages = _messages(steps, schedule)
    sends, takes = _handling(steps, schedule, messages)
    return Costs(tuple(means["F", stage] for stage in stages), inputs, weights, messages, sends, takes)


def _took(records: Iterable[Record]) -> dict[tuple[str, int], list[float]]:
    """Return the durations of all actions, by kind and stage."""
    took: dict[tuple[str, int], list[float]] = defaultdict(list)
    for each in records:
        if each.kind in COMPUTE:
            took[each.kind, each.stage].append(each.end_s - each.start_s)
    return took


def compare(steps: Sequence[Sequence[Record]], schedule: Schedule) -> Compared:
    """Compare the mean bubble of recorded steps with the bubble of a simulation that uses their measured costs.

    Raises:
        ValueError: In the same cases as `mean_costs`.
    """
    costs = mean_costs(steps, schedule)
    simulation = simulate(with_messages(schedule), costs)
    measured = fmean(bubble(records, schedule.ranks) for records in steps)
    return Compared(measured, simulation.bubble, costs, simulation)


def _messages(steps: Sequence[Sequence[Record]], schedule: Schedule) -> tuple[float, ...]:
    """Return the duration of a message over each cut."""
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
    """Return the seconds that every stage needs to send its output, and to accept a message that has arrived."""
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
    """Return the action whose result this one receives from another rank."""
    return next(each for each in needs(action, schedule.stages) if each.stage != action.stage)


def _covered(spans: list[tuple[float, float]]) -> float:
    """Return the total length of the union of intervals."""
    covered_s, until_s = 0.0, float("-inf")
    for start, end in sorted(spans):
        covered_s += max(0.0, end - max(start, until_s))
        until_s = max(until_s, end)
    return covered_s
