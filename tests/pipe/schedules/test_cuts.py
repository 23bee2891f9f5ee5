"""Cuts of a model into stages: drawn examples, the dynamic program compared with brute force, and refusals."""

import re
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.pipe.schedules.cuts import Cuts, balanced, balanced_ranks, by_hand, even, lengths

WEIGHTS = st.lists(st.integers(0, 6), min_size=1, max_size=9)


def every_cut(layers: int, stages: int) -> list[Cuts]:
    return [(0, *inner) for inner in combinations(range(1, layers), stages - 1)]


def weights_of_stages(weights: list[int], cuts: Cuts) -> list[int]:
    return [sum(weights[start:end]) for start, end in zip(cuts, (*cuts[1:], len(weights)), strict=True)]


def best_by_trying_all(weights: list[int], stages: int) -> Cuts:
    """Return the cut with the smallest bottleneck, then the smallest squares, then the longest first stages."""

    def rank(cuts: Cuts) -> tuple[int, int, tuple[int, ...]]:
        each = weights_of_stages(weights, cuts)
        return max(each), sum(weight * weight for weight in each), tuple(-cut for cut in cuts)

    return min(every_cut(len(weights), stages), key=rank)


def heaviest_rank(weights: list[int], cuts: Cuts, rank_of: list[int]) -> int:
    totals = dict.fromkeys(rank_of, 0)
    for rank, weight in zip(rank_of, weights_of_stages(weights, cuts), strict=True):
        totals[rank] += weight
    return max(totals.values())


def test_even_stages_differ_by_one_layer_and_the_longer_ones_come_first() -> None:
    assert even(7, 3) == (0, 3, 5)
    assert even(8, 4) == (0, 2, 4, 6)
    assert even(3, 3) == (0, 1, 2)
    assert even(5, 1) == (0,)


@given(st.integers(1, 60), st.integers(1, 60))
def test_even_is_balanced_by_count(layers: int, stages: int) -> None:
    if stages <= layers:
        assert even(layers, stages) == balanced([1] * layers, stages)
        assert sum(lengths(even(layers, stages), layers)) == layers


def test_a_heavy_head_gets_a_stage_of_its_own() -> None:
    assert balanced([1, 1, 1, 1, 1, 4], 3) == (0, 3, 5)


def test_layers_that_weigh_nothing_stay_with_the_stage_before() -> None:
    """For example an activation or pool after a convolution, because smaller tensors cross the cut behind it."""
    assert balanced([2, 0, 0, 2, 0], 2) == (0, 3)
    assert balanced([0, 0, 0], 2) == (0, 2)


@given(WEIGHTS, st.integers(1, 9))
def test_balanced_is_the_best_of_all_cuts(weights: list[int], stages: int) -> None:
    if stages <= len(weights):
        assert balanced(weights, stages) == best_by_trying_all(weights, stages)


def test_the_heaviest_stage_counts_before_the_squares() -> None:
    assert balanced([2, 4, 1, 2, 3], 3) == (0, 1, 3)  # stages of 2, 5, 5; (0, 2, 4) has 6, 3, 3 and equal squares


@pytest.mark.parametrize("weight", [0.1, 0.3])
def test_balanced_does_not_depend_on_roundings(weight: float) -> None:
    """0.1 + 0.2 is not 0.3: with floats, stages with equally many equal layers would differ in weight."""
    for layers in range(1, 14):
        for stages in range(1, min(layers, 5) + 1):
            assert balanced([weight] * layers, stages) == even(layers, stages)


@given(WEIGHTS, st.sampled_from([[0, 1, 0, 1], [0, 1, 1, 0], [0, 1, 2, 2, 1, 0], [0, 0, 0]]))
def test_stages_of_a_rank_are_weighed_together(weights: list[int], rank_of: list[int]) -> None:
    if len(rank_of) <= len(weights):
        found = balanced_ranks(weights, rank_of)
        assert found in every_cut(len(weights), len(rank_of))
        before = heaviest_rank(weights, balanced(weights, len(rank_of)), rank_of)
        assert heaviest_rank(weights, found, rank_of) <= before


def test_a_rank_with_a_heavy_head_gets_fewer_layers_in_its_other_stage() -> None:
    weights, vee = [1] * 24 + [4], [0, 1, 2, 3, 3, 2, 1, 0]
    assert heaviest_rank(weights, balanced(weights, 8), vee) == 8
    assert heaviest_rank(weights, balanced_ranks(weights, vee), vee) == 7
    assert balanced_ranks(weights, [0, 1, 2]) == balanced(weights, 3)


def test_by_hand_takes_the_first_layers_of_stages_with_or_without_the_first_stage() -> None:
    assert by_hand([2, 5], 7, 3) == by_hand([0, 2, 5], 7, 3) == by_hand((0, 2, 5), 7, 3) == (0, 2, 5)
    assert by_hand([], 7, 1) == by_hand([0], 7, 1) == (0,)


@pytest.mark.parametrize(
    ("bounds", "layers", "stages", "said"),
    [
        ([2], 7, 3, "cuts [2] make 2 stages of 7 layers, not 3; expected the first layers"),
        ([], 7, 3, "cuts [] make 1 stage of 7 layers, not 3"),
        ([2, 4, 6], 7, 3, "cuts [2, 4, 6] make 4 stages of 7 layers, not 3"),
        ([5, 2], 7, 3, "cuts [5, 2]: 2 is not greater than 5"),
        ([2, 2], 7, 3, "cuts [2, 2]: 2 is not greater than 2"),
        ([-1, 2], 7, 3, "cuts [-1, 2]: -1 is not greater than 0"),
        (
            [2, 7],
            7,
            3,
            "cuts [2, 7]: there is no layer 7, only 7 layers; expected the first layers of stages 1 to 2, increasing",
        ),
        ([3], 7, 1, "cuts [3] make 2 stages of 7 layers, not 1; expected none for one stage"),
        ([1, 2], 2, 3, "3 stages of 2 layers: a stage needs at least one layer; use at most 2"),
    ],
)
def test_cuts_by_hand_that_cannot_be(bounds: list[int], layers: int, stages: int, said: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(said)):
        by_hand(bounds, layers, stages)


def test_more_stages_than_layers_are_refused_with_both_numbers() -> None:
    said = "5 stages of 4 layers: a stage needs at least one layer; use at most 4"
    for cut in (lambda: even(4, 5), lambda: balanced([1] * 4, 5), lambda: balanced_ranks([1] * 4, [0, 1, 2, 3, 4])):
        with pytest.raises(ValueError, match=said):
            cut()
    with pytest.raises(ValueError, match="0 stages: expected at least 1"):
        even(4, 0)


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_weights_that_are_none_are_refused(weight: float) -> None:
    with pytest.raises(ValueError, match=rf"layer 1 has weight {weight}; expected a finite number of 0 or more"):
        balanced([1.0, weight], 2)
