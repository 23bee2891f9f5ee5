"""One curve: a line, and points around it."""

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.collectives_bench.cost.curves import CostLine, Fitted, Kind, Points, line_of, monotone
from muster.collectives_bench.cost.heldout import choose, fitted

SIZES = tuple(2**power for power in range(12, 28, 2))


def points(alpha: float, beta: float, *, noise: float = 0.0, sizes: tuple[int, ...] = SIZES) -> Points:
    draw = random.Random(7)
    return tuple((size, (alpha + beta * size) * math.exp(draw.gauss(0, noise))) for size in sizes)


def test_a_line_is_found_to_the_last_digit_where_there_is_no_noise() -> None:
    piece = line_of(points(5e-4, 7e-10))
    assert (piece.alpha_s, piece.beta_s) == (pytest.approx(5e-4), pytest.approx(7e-10))


def test_small_sizes_count_as_much_as_large_ones() -> None:
    piece = line_of(points(5e-4, 7e-10, noise=0.05))
    assert piece.alpha_s == pytest.approx(5e-4, rel=0.1)
    assert piece.beta_s == pytest.approx(7e-10, rel=0.1)


def test_one_bad_size_does_not_bend_the_line() -> None:
    good = list(points(5e-4, 7e-10))
    good[3] = (good[3][0], 4 * good[3][1])
    assert line_of(tuple(good)).alpha_s == pytest.approx(5e-4, rel=0.05)


def test_neither_part_of_a_line_is_ever_negative() -> None:
    falling = ((1000, 3.0), (2000, 2.0), (4000, 1.0))
    rising = ((1000, 1.0), (2000, 4.0), (4000, 16.0))
    assert (line_of(falling).beta_s, line_of(rising).alpha_s) == (0.0, 0.0)
    assert line_of(((5000, 2.0),)) == CostLine(alpha_s=2.0, beta_s=0.0)


def test_a_doubled_cost_per_byte_from_some_size_on_is_followed() -> None:
    sizes = tuple(2**power for power in range(16, 28))
    bent = tuple((size, 1e-4 + size * (1e-9 if size <= 2**21 else 2.5e-9)) for size in sizes)
    assert fitted(bent).seconds(3 * 2**22) == pytest.approx(1e-4 + 3 * 2**22 * 2.5e-9, rel=0.02)


def test_a_straight_line_is_chosen_where_it_is_one_and_points_where_sizes_wander() -> None:
    assert choose(points(5e-4, 7e-10)) == "line"
    wandering = tuple(
        (size, took * (1 + 0.5 * math.sin(place / 2))) for place, (size, took) in enumerate(points(1e-4, 1e-9))
    )
    assert choose(wandering) == "points"


@given(
    st.lists(st.floats(1e-6, 10.0), min_size=2, max_size=10),
    st.sampled_from(["line", "points"]),
    st.lists(st.integers(1, 2**30), min_size=2, max_size=8),
)
def test_more_bytes_never_take_less_time(times: list[float], kind: Kind, asked: list[int]) -> None:
    drawn = fitted(tuple(zip(SIZES, times, strict=False)), kind)
    found = [drawn.seconds(size) for size in sorted(asked)]
    assert all(after >= before * (1 - 1e-9) for before, after in itertools.pairwise(found))
    assert all(each > 0 for each in found)


@given(st.lists(st.floats(1e-6, 10.0), min_size=1, max_size=12))
def test_pooling_makes_times_rise_and_leaves_rising_ones_alone(times: list[float]) -> None:
    given_points = tuple(zip(range(1, 13), times, strict=False))
    found = [took for _, took in monotone(given_points)]
    assert all(after >= before * (1 - 1e-12) for before, after in itertools.pairwise(found))
    assert [took for _, took in monotone(tuple(zip(range(1, 13), sorted(times), strict=False)))] == pytest.approx(
        sorted(times)
    )


def test_points_are_met_exactly_and_followed_by_the_lines_shape_outside() -> None:
    drawn = Fitted(CostLine(alpha_s=1.0, beta_s=1e-3), ((1000, 2.0), (4000, 3.0)))
    assert [drawn.seconds(size) for size in (1000, 4000)] == [2.0, 3.0]
    assert drawn.seconds(8000) == pytest.approx(3.0 * 9 / 5)
    assert drawn.seconds(500) == pytest.approx(2.0 * 1.5 / 2)
    assert 2.0 < drawn.seconds(2000) < 3.0
