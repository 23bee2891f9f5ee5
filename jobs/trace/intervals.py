"""Union, intersection and difference of sets of intervals. A set is a sorted list of disjoint intervals. Pure.

first    ████  ████
second     █████            intersection  ██ ██      difference (first - second)  ██   ██
"""

from collections.abc import Iterable
from typing import TypeAlias

Interval: TypeAlias = tuple[float, float]  # start, end
Intervals: TypeAlias = list[Interval]  # sorted, not empty, with a gap between any two


def union(intervals: Iterable[Interval]) -> Intervals:
    """Merge intervals given in any order. Empty intervals are dropped."""
    merged: Intervals = []
    for start, end in sorted(each for each in intervals if each[0] < each[1]):
        if merged and start <= merged[-1][1]:
            if end > merged[-1][1]:
                merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged


def intersection(first: Intervals, second: Intervals) -> Intervals:
    """Return the intersection of two sets of intervals."""
    common: Intervals = []
    one = two = 0
    while one < len(first) and two < len(second):
        start = max(first[one][0], second[two][0])
        end = min(first[one][1], second[two][1])
        if start < end:
            common.append((start, end))
        if first[one][1] <= second[two][1]:
            one += 1
        else:
            two += 1
    return common


def difference(first: Intervals, second: Intervals) -> Intervals:
    """Return the part of the first set that is not in the second."""
    left: Intervals = []
    at = 0
    for start, end in first:
        while at < len(second) and second[at][1] <= start:
            at += 1
        following = at
        while following < len(second) and second[following][0] < end:
            if start < second[following][0]:
                left.append((start, second[following][0]))
            start = max(start, second[following][1])
            following += 1
        if start < end:
            left.append((start, end))
    return left


def length(intervals: Intervals) -> float:
    """Return the total length of a set of intervals."""
    return sum(end - start for start, end in intervals)
