"""Describe samples without assuming a distribution: quantiles, and a confidence interval of the median. Pure Python.

The interval is that of order statistics, exact for every continuous distribution of independent samples. The number of
samples below the median is binomial(n, 1/2). If this number is at least l and at most n - l, the l-th smallest and the
l-th largest enclose the median. The probability of that is the confidence of the interval (David & Nagaraja, Order
Statistics, 7.1; an approximation is in Hoefler & Belli, SC'15, rule 5). With five samples or fewer, even the smallest
and the largest do not reach 95 %. `confidence_of` returns their actual confidence.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from statistics import median

CONFIDENCE = 0.95
LEAST_SAMPLES = 6  # the smallest and largest of six enclose the median with a probability of 1 - 2^-5 = 97 %


def quantile(values: Sequence[float], share: float) -> float:
    """Return a quantile, interpolated linearly: the value at position (n - 1) * share, counted from 0.

    This is type 7 of Hyndman & Fan (1996), numpy's default. If n * (1 - share) < 1, the result is little more than
    the largest value: a p99 needs a hundred samples.
    """
    assert values, "no values"
    ordered = sorted(values)
    place = (len(ordered) - 1) * share
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def median_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return the narrowest pair of order statistics that encloses the median with at least this confidence.

    With too few values return the smallest and the largest; `confidence_of(n)` is then below the requested confidence.
    """
    assert values, "no values"
    ordered, low = sorted(values), _low_place(len(values), confidence)
    return ordered[low - 1], ordered[-low]


def confidence_of(n: int) -> float:
    """Return the actual confidence of `median_interval` for n values, which may differ from the requested 95 %."""
    low = _low_place(n, CONFIDENCE)
    return math.fsum(_binomial(n, below) for below in range(low, n - low + 1))


def is_precise(samples: Sequence[float], precision: float) -> bool:
    """Return True if the 95 % interval of the median is within +-precision of it; False for fewer than six samples.

    A block that calls this after every batch stops early when the interval is narrow by chance. Its interval then
    covers the median in slightly less than 95 % of blocks: 94 % with log-normal samples, batches of 5 and a precision
    of 3 %. Comparisons use launches rather than samples.
    """
    if len(samples) < LEAST_SAMPLES:
        return False
    low, high = median_interval(samples)
    return high - low <= 2 * precision * median(samples)


def spread(values: Sequence[float]) -> float:
    """Return the coefficient of variation: the standard deviation (n - 1) over the mean; 0 for one value."""
    mean = math.fsum(values) / len(values)
    if len(values) < 2 or mean == 0:
        return 0.0
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)) / mean


@lru_cache(maxsize=4096)
def _low_place(n: int, confidence: float) -> int:
    """Return the largest l at which the l-th smallest and largest of n values have enough confidence."""
    low = (n + 1) // 2
    between = math.fsum(_binomial(n, below) for below in range(low, n - low + 1))
    while between < confidence and low > 1:
        low -= 1
        between += _binomial(n, low) + _binomial(n, n - low)
    return low


def _binomial(n: int, k: int) -> float:
    """Return the probability of k heads in n fair coin tosses, without overflow."""
    return math.exp(math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) - n * math.log(2))
