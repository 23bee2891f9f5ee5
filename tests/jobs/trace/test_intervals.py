"""Unions of time: against drawings, and against sets of ticks."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from muster.jobs.trace.intervals import difference, intersection, length, union
from support.traces import spans

Interval = tuple[int, int]
INTERVALS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=12)


def ticks(intervals: list[Interval]) -> set[int]:
    return {tick for start, end in intervals for tick in range(start, end)}


def is_union(intervals: list[Interval]) -> bool:
    apart = all(before[1] < after[0] for before, after in pairwise(intervals))
    return apart and all(start < end for start, end in intervals)


def test_a_drawing() -> None:
    first, second = spans("..###..##"), spans("...###.#.")
    assert union([*second, *first]) == [(20.0, 60.0), (70.0, 90.0)]
    assert intersection(first, second) == [(30.0, 50.0), (70.0, 80.0)]
    assert difference(first, second) == [(20.0, 30.0), (80.0, 90.0)]


@given(INTERVALS, INTERVALS)
def test_they_are_the_operations_of_sets(first: list[Interval], second: list[Interval]) -> None:
    one, two = union(first), union(second)
    for result, wanted in (
        (one, ticks(first)),
        (intersection(one, two), ticks(first) & ticks(second)),
        (difference(one, two), ticks(first) - ticks(second)),
    ):
        assert is_union(result)
        assert ticks(result) == wanted
        assert length(result) == len(wanted)
