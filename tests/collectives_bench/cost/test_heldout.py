"""Errors on what was left out, and intervals that hold what they promise."""

import math
import random

import pytest

from muster.collectives_bench.cost.heldout import (
    Samples,
    choose,
    errors_of,
    fitted,
    intervals,
    medians,
    quantiles,
    residuals,
    sizes_left_out,
)
from support.costs import SIZES


def series(noise: float, seed: int, launches: int = 5) -> Samples:
    draw = random.Random(seed)
    return tuple(
        (size, tuple((1e-4 + 1e-9 * size) * math.exp(draw.gauss(0, noise)) for _ in range(launches))) for size in SIZES
    )


def test_errors_are_mean_median_largest_and_shares() -> None:
    found = errors_of([(1.05, 1.0), (0.85, 1.0), (2.0, 1.0), (3.0, 3.0)])
    assert found is not None
    assert (found.points, found.largest, found.median) == (4, 1.0, pytest.approx(0.1))
    assert (found.mean, found.within_10, found.within_20) == (pytest.approx(0.3), 0.5, 0.75)
    assert errors_of([]) is None


def test_ends_are_not_left_out() -> None:
    exact = medians(series(0.0, 1))
    assert [measured for _, measured in sizes_left_out(exact)] == [took for _, took in exact[1:-1]]


@pytest.mark.parametrize("noise", [0.02, 0.1, 0.3])
def test_nine_of_ten_new_measurements_lie_inside_the_interval(noise: float) -> None:
    """A new cluster's worth: what was fitted on five launches, against the median of five others."""
    curves = [series(noise, seed) for seed in range(16)]
    wide = intervals([residuals(each, choose(medians(each)), 0) for each in curves])
    inside = [
        1 / factor <= took / fitted(medians(curve)).seconds(size) <= factor
        for seed, (curve, factor) in enumerate(zip(curves, wide, strict=True))
        for size, took in medians(series(noise, 1000 + seed))[1:-1]
    ]
    assert 0.80 <= sum(inside) / len(inside) <= 1.0


def test_the_noisier_curve_has_the_wider_interval() -> None:
    curves = [series(0.02, 1), series(0.02, 2), series(0.2, 3)]
    wide = intervals([residuals(each, choose(medians(each)), 0) for each in curves])
    assert math.log(wide[2]) > 2 * math.log(max(wide[:2]))


def test_draws_repeat_with_the_seed() -> None:
    measured = series(0.1, 5)
    assert residuals(measured, "line", 3) == residuals(measured, "line", 3) != residuals(measured, "line", 4)


def test_too_few_sizes_leave_the_noise_of_launches_alone() -> None:
    barrier = ((0, (1.0, 1.1, 0.9)),)
    found = residuals(barrier, "line", 0)
    assert max(map(abs, found)) <= math.log(1.1 / 0.9) + 1e-9
    assert intervals([[]]) == [1.0]


def test_quantiles_hold_one() -> None:
    assert quantiles([(1.0, 2.0)] * 20) == (1.0, 2.0)
    low, high = quantiles([(1.0, ratio / 100) for ratio in range(50, 151)])
    assert (low, high) == (pytest.approx(0.55, abs=0.011), pytest.approx(1.45, abs=0.011))
