"""Quantiles and the interval of the median: what is promised of them holds, by simulation where it is a chance."""

import itertools
import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.collectives_bench.records import SampleTimes
from muster.jobs.measuring import stats

times = st.lists(st.floats(0.0, 1e9), min_size=1, max_size=200)


def heavy(rng: random.Random) -> float:
    """Draw a call as a shared machine makes them: most alike, some far slower."""
    return rng.lognormvariate(0.0, 0.1) * (rng.choice((3.0, 10.0)) if rng.random() < 0.1 else 1.0)


@pytest.mark.parametrize("n", [6, 9, 15, 40])
def test_the_interval_encloses_the_median_as_often_as_it_says(n: int) -> None:
    rng = random.Random(n)
    truth = statistics.median([heavy(rng) for _ in range(100_001)])
    repeats = 3000
    hits = 0
    for _ in range(repeats):
        low, high = stats.median_interval([heavy(rng) for _ in range(n)])
        hits += low <= truth <= high
    expected = stats.confidence_of(n)
    assert expected >= 0.95
    assert hits / repeats == pytest.approx(expected, abs=4 * math.sqrt(expected * (1 - expected) / repeats))


def test_the_interval_is_that_of_all_coin_throws_counted() -> None:
    n = 11
    counts = [sum(heads) for heads in itertools.product((0, 1), repeat=n)]
    for low in range(1, n // 2 + 1):  # the l-th smallest is below the median if at least l values are
        if sum(low <= count <= n - low for count in counts) / 2**n >= 0.95:
            widest = low
    assert stats.median_interval(range(1, n + 1)) == (widest, n + 1 - widest)


@pytest.mark.parametrize(("n", "confidence"), [(1, 0.0), (2, 0.5), (3, 0.75), (4, 0.875), (5, 0.9375)])
def test_fewer_than_six_values_have_their_extremes_and_say_less_than_95_percent(n: int, confidence: float) -> None:
    values = [float(value) for value in range(n)]
    assert stats.median_interval(values) == (values[0], values[-1])
    assert stats.confidence_of(n) == pytest.approx(confidence)


@pytest.mark.parametrize("n", [100, 1000, 30_000])
def test_of_many_values_the_interval_is_that_of_the_normal_approximation(n: int) -> None:
    low, high = stats.median_interval([float(value) for value in range(1, n + 1)])
    assert low == pytest.approx(n / 2 - 0.98 * math.sqrt(n), abs=1.5)  # facts of Hoefler & Belli
    assert high == pytest.approx(n / 2 + 1 + 0.98 * math.sqrt(n), abs=1.5)


@given(times)
def test_quantiles_lie_in_order_within_the_values(values: list[float]) -> None:
    found = [stats.quantile(values, share) for share in (0.0, 0.25, 0.5, 0.95, 0.99, 1.0)]
    assert (found[0], found[-1]) == (min(values), max(values))
    slack = 1e-12 * max(values)  # of rounding
    assert all(below <= above + slack for below, above in itertools.pairwise(found))


@given(times, st.floats(0.5, 0.999))
def test_the_interval_holds_the_median_and_does_not_depend_on_order(values: list[float], confidence: float) -> None:
    low, high = stats.median_interval(values, confidence)
    assert low <= statistics.median(values) * (1 + 1e-12)
    assert statistics.median(values) <= high * (1 + 1e-12)
    assert stats.median_interval(values[::-1], confidence) == (low, high)


@given(times)
def test_a_timing_is_in_order(values: list[float]) -> None:
    timing = SampleTimes.of(values)
    assert timing.n == len(values)
    slack = 1 + 1e-12
    ordered = [timing.min_us, timing.p50_us, timing.p95_us, timing.p99_us, timing.max_us]
    assert all(below <= above * slack for below, above in itertools.pairwise(ordered))
    assert timing.min_us <= timing.low_us <= timing.high_us <= timing.max_us
    assert timing.mean_us == pytest.approx(statistics.fmean(values))


def test_quantiles_are_linear_between_neighbours() -> None:
    assert stats.quantile([10.0, 20.0, 30.0, 40.0], 0.5) == 25.0
    assert stats.quantile([10.0, 20.0], 0.95) == pytest.approx(19.5)


def test_precision_is_never_believed_of_fewer_than_six_samples() -> None:
    assert not stats.is_precise([1.0] * 5, 0.5)
    assert stats.is_precise([1.0] * 6, 0.03)


def test_precision_is_of_half_the_interval() -> None:
    samples = [97.0, 97.0, 100.0, 100.0, 103.0, 103.0]
    assert stats.is_precise(samples, 0.03)
    assert not stats.is_precise(samples, 0.029)


def test_stopping_as_soon_as_it_is_precise_costs_little_coverage() -> None:
    """The docstring of is_precise says 94 %."""
    rng = random.Random(1)
    hits, repeats = 0, 1000
    for _ in range(repeats):
        samples: list[float] = []
        while not stats.is_precise(samples, 0.03):
            samples += [rng.lognormvariate(0.0, 0.15) for _ in range(5)]
        low, high = stats.median_interval(samples)
        hits += low <= 1.0 <= high
    assert 0.92 <= hits / repeats <= 0.96


def test_the_spread_is_the_standard_deviation_over_the_mean() -> None:
    assert stats.spread([1.0, 3.0]) == pytest.approx(math.sqrt(2.0) / 2)
    assert stats.spread([5.0]) == 0.0
