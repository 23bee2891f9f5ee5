"""One curve: lines, breaks, points, and the choice among them."""

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.collectives_bench.cost.curves import Piece, around, monotone, seconds_at
from muster.collectives_bench.cost.pieces import CANDIDATES, Points, best_breaks, choose, left_out, line, mean_error

SIZES = tuple(2**power for power in range(12, 28, 2))


def points(alpha: float, beta: float, *, noise: float = 0.0, sizes: tuple[int, ...] = SIZES) -> Points:
    draw = random.Random(7)
    return tuple((size, (alpha + beta * size) * math.exp(draw.gauss(0, noise))) for size in sizes)


def test_a_line_is_found_to_the_last_digit_where_there_is_no_noise() -> None:
    piece = line(points(5e-4, 7e-10))
    assert (piece.alpha_s, piece.beta_s) == (pytest.approx(5e-4), pytest.approx(7e-10))


def test_small_sizes_count_as_much_as_large_ones() -> None:
    piece = line(points(5e-4, 7e-10, noise=0.05))
    assert piece.alpha_s == pytest.approx(5e-4, rel=0.1)
    assert piece.beta_s == pytest.approx(7e-10, rel=0.1)


def test_one_bad_size_does_not_bend_the_line() -> None:
    good = list(points(5e-4, 7e-10))
    good[3] = (good[3][0], 4 * good[3][1])
    assert line(tuple(good)).alpha_s == pytest.approx(5e-4, rel=0.05)


def test_neither_part_of_a_line_is_ever_negative() -> None:
    falling = ((1000, 3.0), (2000, 2.0), (4000, 1.0))
    rising = ((1000, 1.0), (2000, 4.0), (4000, 16.0))
    assert (line(falling).beta_s, line(rising).alpha_s) == (0.0, 0.0)
    assert line(((5000, 2.0),)) == Piece(alpha_s=2.0, beta_s=0.0)


def test_a_doubled_cost_per_byte_from_some_size_on_is_found_and_where() -> None:
    sizes = tuple(2**power for power in range(16, 28))
    bent = tuple((size, 1e-4 + size * (1e-9 if size <= 2**21 else 2.5e-9)) for size in sizes)
    breaks = best_breaks(bent)
    assert [sizes[each] for each in breaks] == [2**22]
    assert choose(bent).seconds(3 * 2**22) == pytest.approx(1e-4 + 3 * 2**22 * 2.5e-9, rel=0.02)


def test_a_straight_line_gets_no_break_for_its_noise() -> None:
    assert best_breaks(points(5e-4, 7e-10, noise=0.02)) == ()


def test_a_straight_line_is_chosen_where_it_is_one_and_points_where_sizes_wander() -> None:
    assert choose(points(5e-4, 7e-10)).kind == "line"
    wandering = tuple(
        (size, took * (1 + 0.5 * math.sin(place / 2))) for place, (size, took) in enumerate(points(1e-4, 1e-9))
    )
    assert choose(wandering).kind in ("points", "smooth")


@given(
    st.lists(st.floats(1e-6, 10.0), min_size=2, max_size=10),
    st.sampled_from(sorted(CANDIDATES)),
    st.lists(st.integers(1, 2**30), min_size=2, max_size=8),
)
def test_more_bytes_never_take_less_time(times: list[float], kind: str, asked: list[int]) -> None:
    fitted = CANDIDATES[kind](tuple(zip(SIZES, times, strict=False)))  # type: ignore[index]
    found = [fitted.seconds(size) for size in sorted(asked)]
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
    measured, piece = ((1000, 2.0), (4000, 3.0)), Piece(alpha_s=1.0, beta_s=1e-3)
    assert [around(measured, piece, size) for size in (1000, 4000)] == [2.0, 3.0]
    assert around(measured, piece, 8000) == pytest.approx(3.0 * 9 / 5)
    assert around(measured, piece, 500) == pytest.approx(2.0 * 1.5 / 2)
    assert 2.0 < around(measured, piece, 2000) < 3.0


def test_a_piece_that_begins_lower_than_the_one_before_ends_waits_for_it() -> None:
    pieces = [Piece(alpha_s=0.0, beta_s=1.0, upto_bytes=10.0), Piece(alpha_s=0.0, beta_s=0.5)]
    assert [seconds_at("pieces", pieces, [(1, 1.0)], size) for size in (10, 11, 30)] == [10.0, 10.0, 15.0]


def test_each_size_but_the_ends_is_left_out_once_and_predicted_from_the_others() -> None:
    exact = points(1e-4, 1e-9)
    pairs = left_out(exact, CANDIDATES["line"])
    assert [measured for _, measured in pairs] == [took for _, took in exact[1:-1]]
    assert mean_error(pairs) < 1e-9
