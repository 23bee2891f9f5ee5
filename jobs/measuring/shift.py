"""Estimate the shift between two series of launches: distribution-free tests, and t-tests for too few launches.

A shift is a difference of logarithms: 0.1 is about 10 % slower. Each test has an estimate of the shift, the two-sided
p-value of the hypothesis that the shift is `at`, and the interval of all shifts whose p-value exceeds alpha.

    paired_ranks                  Wilcoxon's signed ranks of the pairs' differences; estimate of Hodges & Lehmann (1963)
    unpaired_ranks                Wilcoxon's rank sum (Mann & Whitney 1947), with all differences between the two series
    paired_mean, unpaired_mean    t-tests of the means of the logarithms, paired or Welch's

If nothing has changed, the two launches of a pair are exchangeable, so a difference is as likely as its negative. The
level of the signed-rank test is therefore exact for any noise. An outlier counts only as the largest rank. With few
launches no rank test can reach a small level (n pairs: 2^(1 - n)), and the t-test is used. With heavy-tailed noise the
t-test is conservative, because outliers widen its interval faster than they shift its centre.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist, median

EXACT = 60  # number of launches above which the normal approximation is used (within 1 % of the level 0.001)


@dataclass(frozen=True)
class RankTest:
    """A rank test, represented by sorted values. Its statistic is the number of values above a shift."""

    values: tuple[float, ...]  # Walsh averages, or all pairwise differences
    sizes: tuple[int, ...]  # (pairs,) or (before, after)

    @property
    def estimate(self) -> float:
        """The most plausible shift."""
        return median(self.values)

    @property
    def least_p(self) -> float:
        """The smallest p-value possible with this many launches."""
        return min(1.0, 2 * _at_most(0, self.sizes))

    def p_value(self, at: float = 0.0) -> float:
        """Return the two-sided p-value of the hypothesis that the shift is `at`."""
        below, above = bisect_left(self.values, at), len(self.values) - bisect_right(self.values, at)
        ties = len(self.values) - below - above
        return min(1.0, 2 * _at_most(min(below, above) + ties // 2, self.sizes))

    def interval(self, alpha: float) -> tuple[float, float]:
        """Return the interval of the shifts that are not rejected at this level; infinite with too few launches."""
        place = -1  # number of values outside the interval, at each end
        while place + 1 < len(self.values) // 2 and 2 * _at_most(place + 1, self.sizes) <= alpha:
            place += 1
        return (-math.inf, math.inf) if place < 0 else (self.values[place], self.values[-1 - place])


@dataclass(frozen=True)
class MeanTest:
    """A t-test, represented by its estimate, its standard error and its degrees of freedom."""

    estimate: float
    error: float
    freedom: int

    def p_value(self, at: float = 0.0) -> float:
        if self.error == 0:
            return 1.0 if self.estimate == at else 0.0
        return student_p((self.estimate - at) / self.error, self.freedom)

    def interval(self, alpha: float) -> tuple[float, float]:
        half = self.error * student_quantile(alpha, self.freedom)
        return self.estimate - half, self.estimate + half


Shift = RankTest | MeanTest


def paired_ranks(differences: Sequence[float]) -> RankTest:
    """Test differences by their signed ranks, using Walsh averages: the means of all pairs, including (x, x)."""
    return RankTest(
        tuple(sorted((first + second) / 2 for i, first in enumerate(differences) for second in differences[i:])),
        (len(differences),),
    )


def unpaired_ranks(before: Sequence[float], after: Sequence[float]) -> RankTest:
    """Test two series by the ranks of all their values."""
    return RankTest(tuple(sorted(y - x for x in before for y in after)), (len(before), len(after)))


def paired_mean(differences: Sequence[float]) -> MeanTest:
    """Test two or more differences by their mean."""
    mean, variance = _moments(differences)
    return MeanTest(mean, math.sqrt(variance / len(differences)), len(differences) - 1)


def unpaired_mean(before: Sequence[float], after: Sequence[float]) -> MeanTest:
    """Test two series of two or more values by their means (Welch 1947), with degrees of freedom rounded down."""
    (x, of_x), (y, of_y) = _moments(before), _moments(after)
    a, b = of_x / len(before), of_y / len(after)
    shares = a**2 / (len(before) - 1) + b**2 / (len(after) - 1)
    freedom = math.floor((a + b) ** 2 / shares) if shares > 0 else len(before) + len(after) - 2
    return MeanTest(y - x, math.sqrt(a + b), max(freedom, 1))


def student_p(t: float, freedom: int) -> float:
    """Return the probability of a |t| at least this large, by Abramowitz & Stegun, 26.7.3 and 26.7.4."""
    angle = math.atan(abs(t) / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term = total = cosine if odd else 1.0
    if freedom == 1:
        total = 0.0
    for k in range(2 + odd, freedom - 1, 2):
        term *= (k - 1) / k * cosine**2
        total += term
    inside = 2 / math.pi * (angle + sine * total) if odd else sine * total
    return min(1.0, max(0.0, 1.0 - inside))


@lru_cache(maxsize=1024)
def student_quantile(alpha: float, freedom: int) -> float:
    """Return the t that is exceeded, on either side, with probability alpha; by bisection."""
    low, high = 0.0, 1.0
    while student_p(high, freedom) > alpha and high < 1e9:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if student_p(middle, freedom) > alpha else (low, middle)
    return high


def _moments(values: Sequence[float]) -> tuple[float, float]:
    mean = math.fsum(values) / len(values)
    return mean, math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)


def _at_most(count: int, sizes: tuple[int, ...]) -> float:
    """Return the probability of at most `count` values on one side of the true shift."""
    if max(sizes) > EXACT:
        if len(sizes) == 1:
            (n,) = sizes
            mean, variance = n * (n + 1) / 4, n * (n + 1) * (2 * n + 1) / 24
        else:
            n, m = sizes
            mean, variance = n * m / 2, n * m * (n + m + 1) / 12
        return NormalDist(mean, math.sqrt(variance)).cdf(count + 0.5)
    return _cumulated(sizes)[count]


@lru_cache(maxsize=256)
def _cumulated(sizes: tuple[int, ...]) -> list[float]:
    """Return the distribution function at 0, 1, 2, ... All signs, or all choices of ranks, are equally likely."""
    counts = _signed(*sizes) if len(sizes) == 1 else _sums(*sizes)
    everything, total, found = sum(counts), 0, []
    for count in counts:
        total += count
        found.append(total / everything)
    return found


def _signed(n: int) -> list[int]:
    """Return, for each possible sum, the number of subsets of the ranks 1..n that add up to it."""
    counts = [1] + [0] * (n * (n + 1) // 2)
    for rank in range(1, n + 1):
        for total in range(len(counts) - 1, rank - 1, -1):
            counts[total] += counts[total - rank]
    return counts


def _sums(n: int, m: int) -> list[int]:
    """Count the orders of n and m values for each number of inversions, by the Gaussian binomial coefficients."""
    counts = [1] + [0] * (n * m)
    for k in range(1, n + 1):  # multiply by (1 - q^(m + k)) / (1 - q^k)
        for power in range(len(counts) - 1, m + k - 1, -1):
            counts[power] -= counts[power - m - k]
        for power in range(k, len(counts)):
            counts[power] += counts[power - k]
    return counts
