"""Sets of ranks: what is written is what is read."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.jobs.basics.errors import UsageError
from muster.launch.common import rankset


@given(st.frozensets(st.integers(0, 99), min_size=1))
def test_what_is_folded_reads_back(numbers: frozenset[int]) -> None:
    assert rankset.parse(rankset.fold(numbers), option="--rank", count=100) == numbers


@pytest.mark.parametrize(
    ("numbers", "text"), [((), ""), ((3,), "3"), ((0, 1, 2, 5), "0-2, 5"), ((5, 4, 4, 1), "1, 4-5")]
)
def test_numbers_fold_to_sorted_ranges(numbers: tuple[int, ...], text: str) -> None:
    assert rankset.fold(numbers) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("4", "--rank: 4 is not in this run (valid: 0-3)"),
        ("0-99999999999", "--rank: 99999999999 is not in this run (valid: 0-3)"),
        ("a", "--rank: 'a' is neither a number nor a range; write it like 0,8-15 (valid: 0-3)"),
        ("1-", "--rank: '1-' is neither a number nor a range; write it like 0,8-15 (valid: 0-3)"),
        ("", "--rank: '' is neither a number nor a range; write it like 0,8-15 (valid: 0-3)"),
        ("3-1", "--rank: '3-1' runs backwards; write 1-3"),
    ],
)
def test_a_wrong_set_is_refused_with_the_valid_range(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        rankset.parse(text, option="--rank", count=4)
    assert str(caught.value) == message
