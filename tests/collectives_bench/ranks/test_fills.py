"""Data whose right result is known: exact in every type, different everywhere, compared to the last element."""

import pytest
import torch

from muster.collectives_bench.catalog import DTYPES
from muster.collectives_bench.ranks.fills import Pattern

CPU = torch.device("cpu")


@pytest.mark.parametrize(("dtype", "terms"), [("bf16", 64), ("fp16", 64), ("fp32", 64), ("int32", 64), ("bf16", 128)])
def test_sums_over_many_ranks_are_exact_in_every_type_and_in_any_order(dtype, terms):
    pattern = Pattern(dtype, CPU, terms)
    tiles = [pattern.tile(rank, call=3, count=2000) for rank in range(terms)]
    total = torch.stack(tiles).sum(0)
    for order in (range(terms), reversed(range(terms))):
        summed = pattern.typed(torch.zeros(2000))
        for rank in order:
            summed += pattern.typed(tiles[rank])
        assert torch.equal(summed.to(torch.int64), total)
        assert pattern.wrong_sum(summed, call=3) == 0
    assert min(int(tile.min()) for tile in tiles) >= 1


def test_a_type_that_cannot_hold_the_sum_of_all_ranks_is_refused():
    with pytest.raises(ValueError, match=r"bf16 cannot hold a sum over 129 ranks exactly; measure fp32"):
        Pattern("bf16", CPU, 129)


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_differ_by_rank_by_place_and_by_call(dtype):
    pattern = Pattern(dtype, CPU, 4)
    first = pattern.tile(0, 1)
    alike = 3 / pattern.levels + 0.002
    for other in (pattern.tile(1, 1), pattern.tile(0, 2), pattern.tile(0, 1, start=1), pattern.tile(0, 1, start=4096)):
        assert (first == other).float().mean() < alike


@pytest.mark.parametrize("count", [0, 1, 7, 16_411, 16_412, 50_000])
@pytest.mark.parametrize("start", [0, 5, 16_410, 40_000])
def test_a_buffer_is_written_and_judged_by_places_wherever_it_begins(count, start):
    pattern = Pattern("fp32", CPU, 1)
    long = torch.zeros(start + count)
    pattern.write(long, rank=2, call=1)
    part = torch.zeros(count)
    pattern.write(part, rank=2, call=1, start=start)
    assert torch.equal(part, long[start:])
    assert pattern.wrong_of(part, rank=2, call=1, start=start) == 0
    part += 1
    assert pattern.wrong_of(part, rank=2, call=1, start=start) == count


def test_a_long_buffer_is_compared_a_piece_at_a_time(monkeypatch):
    monkeypatch.setattr("muster.collectives_bench.ranks.fills.COMPARED", 40_000)
    pattern = Pattern("fp32", CPU, 1)
    long = torch.zeros(500_001)
    pattern.write(long, rank=0, call=1)
    for where in (0, 16_410, 32_822, 491_000, 500_000):
        long[where] = 0.5
    assert pattern.wrong_of(long, rank=0, call=1) == 5
