"""Pair and test the launches of one row on both sides of a comparison."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Final

from muster.jobs.measuring.launches import MeasuredRow
from muster.jobs.measuring.shift import MeanTest, Shift, paired_mean, paired_ranks, unpaired_mean, unpaired_ranks

LEAST_LAUNCHES: Final = 3
LEAST_PAIRS: Final = 5  # with fewer pairs, results measured one after the other could look interleaved
EQUAL: Final = math.log(1.05)  # differences below 5 % do not matter to a user
NEIGHBOURS: Final = 4  # the launches of a pair are fewer than this many positions apart, in the order of time
PAIRED_SHARE: Final = 0.8  # interleaved results pair at least this share of the launches of the smaller side


LEAST_FOR_DRIFT: Final = 6
NORMAL_QUARTILE: Final = 0.6745  # the median of |x| for a standard normal x


@dataclass(frozen=True)
class Sides:
    """A row's launches on both sides, as logarithms; in pairs if they are interleaved."""

    before: tuple[float, ...]
    after: tuple[float, ...]
    interleaved: bool

    @property
    def launches(self) -> tuple[int, int]:
        """The number of launches on each side."""
        return len(self.before), len(self.after)

    @property
    def drift(self) -> float:
        """The larger of the drifts within the two sides."""
        return max(drift_of(self.before), drift_of(self.after))

    def margin(self, drift: float) -> float:
        """Return the largest shift that drift could explain: 0 for pairs, else 5 % plus twice the larger drift.

        The drift counts twice: if it continues, consecutive results are twice as far apart as the halves of one result.
        """
        return 0.0 if self.interleaved else EQUAL + 2 * max(self.drift, drift)

    @property
    def differences(self) -> list[float]:
        """After minus before, for each pair of interleaved launches."""
        return [after - before for before, after in zip(self.before, self.after, strict=True)]

    def test(self, alpha: float) -> Shift:
        """Return the rank test if it can reach the level with this many launches, else the t-test."""
        ranks = paired_ranks(self.differences) if self.interleaved else unpaired_ranks(self.before, self.after)
        if ranks.least_p <= alpha / 2:
            return ranks
        return self.mean()

    def mean(self) -> MeanTest:
        """Return the t-test."""
        return paired_mean(self.differences) if self.interleaved else unpaired_mean(self.before, self.after)


def drift_of(values: Sequence[float]) -> float:
    """Return the drift within a series: the difference between the medians of its halves, reduced by the noise.

    The noise is estimated from differences between neighbours in time, which share the drift (von Neumann 1941).
    Medians are used, because some launches are outliers. With fewer than six values, return 0.
    """
    if len(values) < LEAST_FOR_DRIFT:
        return 0.0
    half = len(values) // 2
    apart = median(values[-half:]) - median(values[:half])
    noise = median([abs(after - before) for before, after in pairwise(values)]) / NORMAL_QUARTILE / math.sqrt(2)
    return math.sqrt(max(0.0, apart**2 - math.pi * noise**2 / half))  # a median's variance is pi / 2n


def sides_of(before: MeasuredRow, after: MeasuredRow) -> Sides:
    """Return the launches to compare: pairs of neighbours in time if the results alternate, else all launches."""
    pairs = pairs_in_time(before.launch_times, after.launch_times)
    x, y = (tuple(math.log(value) for value in values) for values in values_of(before, after))
    if len(pairs) >= max(LEAST_PAIRS, PAIRED_SHARE * min(len(x), len(y))):
        return Sides(tuple(x[i] for i, _ in pairs), tuple(y[j] for _, j in pairs), interleaved=True)
    return Sides(x, y, interleaved=False)


def pairs_in_time(before: Sequence[float], after: Sequence[float]) -> list[tuple[int, int]]:
    """Pair the launches of two results in order of time, each with the oldest unpaired launch of the other result.

    A B B A A B gives (0, 0), (1, 1), (2, 2). A launch stays unpaired if none of the next `NEIGHBOURS` - 1 fits.
    """
    events = sorted([(time, 0, i) for i, time in enumerate(before)] + [(time, 1, j) for j, time in enumerate(after)])
    waiting: list[tuple[int, int, int]] = []  # (position in time, side, launch), all on one side
    pairs = []
    for place, (_, side, launch) in enumerate(events):
        waiting = [each for each in waiting if place - each[0] < NEIGHBOURS]
        if waiting and waiting[0][1] != side:
            other = waiting.pop(0)[2]
            pairs.append((launch, other) if side == 0 else (other, launch))
        else:
            waiting.append((place, side, launch))
    return pairs


def values_of(before: MeasuredRow, after: MeasuredRow) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the value of each launch to compare, in microseconds: the lower quartile of its calls, else the median.

    On a shared machine, the median of a launch's few calls sometimes includes a scheduler's tick, but the lower
    quartile does not. This table was measured with 40 launches each, while other programs used half of both cores:

                     deviation between launches (of the logarithm)   10 % detected in   25 % detected in
        quartile     0.45                                            38 %               100 %
        median       0.57                                            33 %               89 %
    """
    if before.launch_quartiles_us and after.launch_quartiles_us:
        return before.launch_quartiles_us, after.launch_quartiles_us
    return before.launch_medians_us, after.launch_medians_us


def together(rows: Sequence[Sides]) -> Sides | None:
    """Return the median over rows, launch by launch: the overall change, which is less noisy than any row.

    A row's values are relative to its own median. Launches are matched by their order in time. Rows that differ from
    most in their number of launches are excluded, because their launches do not match.
    """
    if len({sides.interleaved for sides in rows}) != 1:
        return None
    shapes = [sides.launches for sides in rows]
    usual = max(shapes, key=shapes.count)
    whole = [sides for sides in rows if sides.launches == usual]
    if len(whole) < 2:
        return None
    centres = [median([*sides.before, *sides.after]) for sides in whole]

    def over_rows(*launch: float) -> float:
        return median([value - centre for value, centre in zip(launch, centres, strict=True)])

    return Sides(
        tuple(map(over_rows, *(sides.before for sides in whole))),
        tuple(map(over_rows, *(sides.after for sides in whole))),
        rows[0].interleaved,
    )
