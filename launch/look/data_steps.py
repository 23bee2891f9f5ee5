"""Recorded steps of data-parallel ranks: the phases of each rank, and the hidden part of its communication.

computation    data | forward | backward           | wait | optimizer
communication                     [bucket 0 ]
                                      [bucket 1       ]                  hidden: while the rank computed
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Final

from muster.jobs.trace.intervals import Intervals, intersection, length, union
from muster.launch.common import fields

COMPUTES: Final = ("forward", "backward", "optimizer", "replay")
WAIT: Final = "communication"
PHASES: Final = ("data", *COMPUTES[:2], WAIT, *COMPUTES[2:])
MOST_SPANS: Final = 200_000
MOST_OPERATIONS: Final = 6
OTHER: Final = "other messages"
LONGEST_NAME: Final = 40


@dataclass(frozen=True)
class DataSpan:
    """A phase of a rank (`bytes` is None), or a collective from launch to end, in seconds since the step began."""

    rank: int
    kind: str
    number: int
    bytes: int | None
    start_s: float
    end_s: float

    @property
    def communicates(self) -> bool:
        """True for a collective."""
        return self.bytes is not None


@dataclass(frozen=True)
class RankTimes:
    """One rank's times by phase, and its collectives: number, bytes, time in progress, and hidden time."""

    rank: int
    phases_s: Mapping[str, float]
    collectives: int
    bytes: int
    under_way_s: float
    hidden_s: float


@dataclass(frozen=True)
class DataStep:
    """One step of data-parallel ranks; `ranks` are global."""

    mode: str
    ranks: tuple[int, ...]
    spans: tuple[DataSpan, ...]
    timed_by: str
    apart_s: float  # largest possible difference between the ranks' clocks
    not_timed: str  # why collectives are missing; "" if all are there
    left_out: int  # number of records that could not be read

    @property
    def seconds(self) -> float:
        """The duration of the step, from the start of the first rank to the end of the last phase."""
        return max((each.end_s for each in self.spans if not each.communicates), default=0.0)

    def by_rank(self) -> list[RankTimes]:
        """Return the summed times of each rank."""
        return [_times(rank, list(own)) for rank, own in groupby(self.spans, lambda each: each.rank)]

    def summary(self) -> dict[str, Any]:
        """Return the ranks and the duration, without the spans."""
        return {"ranks": list(self.ranks), "seconds": self.seconds}

    def to_json(self) -> dict[str, Any]:
        """Return the step for --json."""
        about = {name: value for name, value in vars(self).items() if name != "spans"}
        by_rank = [vars(each) for each in self.by_rank()]
        return {**about, "seconds": self.seconds, "by_rank": by_rank, "records": [vars(each) for each in self.spans]}


def data_step_of(row: Mapping[str, Any]) -> DataStep | None:
    """Read an untrusted row of a timeline file; return None if it is not a valid step."""
    mode, rank_of, records = fields.text(row.get("mode")), row.get("rank_of"), row.get("records")
    if mode is None or not isinstance(records, list) or not isinstance(rank_of, list):
        return None
    spans = spans_of(records, {rank for each in rank_of[: fields.MOST_RANKS] if (rank := _rank(each)) is not None})
    if all(each.communicates for each in spans):
        return None
    texts = [fields.text(row.get(key)) or "" for key in ("timed_by", "not_timed")]
    spans.sort(key=lambda each: (each.rank, each.communicates, each.start_s))
    ranks, left_out = tuple(sorted({each.rank for each in spans})), len(records) - len(spans)
    return DataStep(mode, ranks, tuple(spans), texts[0], fields.real(row.get("apart_s")) or 0.0, texts[1], left_out)


def spans_of(records: Sequence[Any], ranks: Collection[int]) -> list[DataSpan]:
    """Read the valid ones of untrusted records of some ranks. Operations beyond the first few are named alike."""
    spans, operations = list[DataSpan](), set[str]()
    for each in records[:MOST_SPANS]:
        span = _span(each)
        if span is None or span.rank not in ranks:
            continue
        if span.communicates:
            operations.add(span.kind if len(operations) < MOST_OPERATIONS else OTHER)
            span = span if span.kind in operations else replace(span, kind=OTHER)
        spans.append(span)
    return spans


def hidden_s(collectives: Iterable[DataSpan], busy: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Return how many seconds collectives were in progress, and in how many of these the rank was busy."""
    under_way = _time_of(collectives)
    return length(under_way), length(intersection(under_way, union(busy)))


def _times(rank: int, own: Sequence[DataSpan]) -> RankTimes:
    phases = dict.fromkeys(PHASES, 0.0)
    for each in own:
        if not each.communicates:
            phases[each.kind] += each.end_s - each.start_s
    computing = [(each.start_s, each.end_s) for each in own if not each.communicates and each.kind in COMPUTES]
    sizes = [each.bytes for each in own if each.bytes is not None]
    times_s = hidden_s((each for each in own if each.communicates), computing)
    return RankTimes(rank, phases, len(sizes), sum(sizes), *times_s)


def _span(record: Any) -> DataSpan | None:
    if not isinstance(record, list) or len(record) != 6:
        return None
    rank, kind, number = _rank(record[0]), fields.text(record[1]), fields.number(record[2], least=0)
    size, start, end = fields.number(record[3], least=0), *map(fields.real, record[4:])
    if rank is None or kind is None or number is None or start is None or end is None or not start <= end:
        return None
    if (size is None) != (kind in PHASES) or (size is None and record[3] is not None):
        return None
    return DataSpan(rank, kind[:LONGEST_NAME], number, size, start, end)


def _time_of(spans: Iterable[DataSpan]) -> Intervals:
    return union((each.start_s, each.end_s) for each in spans)


_rank = fields.below(fields.MOST_RANKS)
