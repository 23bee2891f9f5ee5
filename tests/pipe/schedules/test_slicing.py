"""Lengths of slices: as fast as the best of all cuts on the grid."""

from itertools import combinations

import pytest

from muster.pipe.schedules.slicing import SliceTimes, best_slices, step_seconds


@pytest.mark.parametrize("times", [SliceTimes(1.0, 0.1, 0.01), SliceTimes(0.0, 1.0, 0.0), SliceTimes(5.0, 0.0, 0.2)])
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (2, 3), (4, 1), (8, 2)])
def test_no_other_cut_is_faster(times: SliceTimes, stages: int, microbatches: int) -> None:
    length = 10
    cuts = [cut for count in range(length) for cut in combinations(range(1, length), count)]
    lengths = [[end - begin for begin, end in zip((0, *cut), (*cut, length), strict=True)] for cut in cuts]
    fastest = min(step_seconds(each, stages, microbatches, times) for each in lengths)
    found = best_slices(length, stages, microbatches, times)
    assert sum(found) == length
    assert step_seconds(found, stages, microbatches, times) == pytest.approx(fastest)


def test_one_stage_wants_one_slice_and_free_slices_are_many() -> None:
    assert best_slices(2048, 1, 1, SliceTimes(1.0, 1.0, 0.0)) == (2048,)
    assert best_slices(2048, 4, 1, SliceTimes(0.0, 1.0, 0.0)) == (32,) * 64


def test_later_slices_are_shorter_if_attention_costs() -> None:
    found = best_slices(2048, 4, 1, SliceTimes(1e-3, 0.0, 1e-8))
    assert found[0] > found[-1]


def test_numbers_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="length 8, stages 0, micro-batches 1; all must be 1 or more"):
        best_slices(8, 0, 1, SliceTimes(1.0, 1.0, 1.0))
