import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from muster.jobs.train.compare import compare, same_bits, ulp_distance

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(FLOATS)
def test_the_next_float_is_one_ulp_away(value: float):
    here = torch.tensor([value], dtype=torch.float32)
    there = torch.nextafter(here, torch.tensor([math.inf]))
    assert ulp_distance(here, there) == 1


@given(st.lists(FLOATS, min_size=3, max_size=3))
def test_ulp_distances_add_up_along_a_line(values: list[float]):
    low, middle, high = (torch.tensor([value], dtype=torch.float32) for value in sorted(values))
    assert ulp_distance(low, high) == ulp_distance(low, middle) + ulp_distance(middle, high)


@pytest.mark.parametrize(
    ("found", "wanted", "ulp"),
    [(0.0, -0.0, 0), (1.0, 1.0 + 2**-23, 1), (-(2.0**-149), 2.0**-149, 2), (1.0, 2.0, 2**23)],
)
def test_ulp_distances_known_by_heart(found, wanted, ulp):
    assert ulp_distance(torch.tensor([found]), torch.tensor([wanted])) == ulp


def test_a_distance_that_no_integer_holds_is_still_a_number():
    assert ulp_distance(torch.tensor([-1e300]).double(), torch.tensor([1e300]).double()) > 2**62


def test_bits_tell_minus_zero_from_zero_and_a_nan_equals_itself():
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert same_bits(torch.tensor([math.nan]), torch.tensor([math.nan]))
    assert same_bits(torch.tensor(3), torch.tensor(3))


@pytest.mark.parametrize("tolerance", [0.0, 1.0, math.inf])
def test_a_nan_where_a_number_belongs_is_outside_every_finite_tolerance(tolerance):
    row = compare("weight", "parameter", torch.tensor([math.nan]), torch.tensor([1.0]), tolerance)
    assert row.difference == math.inf
    assert row.ok == (tolerance == math.inf)


def test_a_row_is_ok_within_its_tolerance_only():
    found, wanted = torch.tensor([1.0, 2.5]), torch.tensor([1.0, 2.0])
    assert compare("w", "gradient", found, wanted, 0.5).ok
    assert not compare("w", "gradient", found, wanted, 0.4).ok
    assert not compare("w", "gradient", found, wanted, 0.0).ok
    assert compare("w", "gradient", wanted, wanted.clone(), 0.0).bitwise
