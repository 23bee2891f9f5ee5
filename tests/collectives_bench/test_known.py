"""The bytes of gloo's own arithmetic: against a walk through its loops, and against what interfaces once counted."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.collectives_bench.catalog import OPERATIONS
from muster.collectives_bench.known import SEGMENT, best_wire, deviation, known_wire
from muster.collectives_bench.records import BenchCell, WireBytes

MB = 2**20


def cell_of(operation: str, dtype: str = "fp32") -> BenchCell:
    return BenchCell(operation=operation, dtype=dtype, asked_bytes=0, place="in")


def walked(total: int, size: int, itemsize: int) -> int:
    """Walk through the loops of gloo/reduce.cc for every rank, and add what is sent; the root is rank 0."""
    segment = min((total + size * 2 - 1) // (size * 2), SEGMENT // itemsize * itemsize)
    segment = (segment + itemsize - 1) // itemsize * itemsize
    count = max((total + segment - 1) // segment, size * 2)
    count = (count + size - 1) // size * size
    each, sent = count // size, 0
    for rank in range(size):
        for i in range(count - 2):
            offset = (((rank + 1) * each) + i) * segment % (count * segment)
            sent += max(0, min(segment, total - offset))
        if rank != 0:
            sent += max(0, min(each * segment, total - rank * each * segment))
    return sent


@given(st.integers(1, 12 * 2**20 // 4), st.integers(2, 6), st.sampled_from(["fp32", "bf16"]))
def test_a_reduce_moves_what_its_source_sends(elements, ranks, dtype):
    itemsize = {"fp32": 4, "bf16": 2}[dtype]
    nbytes = elements * itemsize
    assert known_wire(cell_of("reduce", dtype), nbytes, ranks) == walked(nbytes, ranks, itemsize)


@pytest.mark.parametrize(("ranks", "measured"), [(2, 2.34), (3, 3.42), (4, 4.42)])
def test_a_reduce_of_25_mb_moves_what_interfaces_counted(ranks, measured):
    assert known_wire(cell_of("reduce"), 25_000_000, ranks) / 25_000_000 == pytest.approx(measured, rel=0.003)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_reduce_scatter_moves_the_bytes_of_an_all_reduce(ranks):
    known, best = known_wire(cell_of("reduce_scatter"), 1200, ranks), best_wire(cell_of("reduce_scatter"), 1200, ranks)
    assert known == known_wire(cell_of("all_reduce"), 1200, ranks) == 2 * best


def test_of_what_we_know_nothing_else_the_best_is_expected():
    for name in OPERATIONS:
        if name not in ("reduce", "reduce_scatter"):
            assert known_wire(cell_of(name), 960, 4) == best_wire(cell_of(name), 960, 4)
        assert known_wire(cell_of(name), 960, 4, backend="nccl") == best_wire(cell_of(name), 960, 4)


def test_one_rank_sends_nothing():
    assert known_wire(cell_of("reduce"), 960, 1) == 0


def wire_of(sent: float, best: float, known: float) -> WireBytes:
    return WireBytes(interfaces=["lo"], calls=1, sent_bytes=sent * MB, best_bytes=best * MB, known_bytes=known * MB)


def test_deviations_are_named():
    assert deviation("all_reduce", wire_of(6.03, 6, 6)) == ""
    assert deviation("reduce_scatter", wire_of(6.01, 3, 6)) == (
        "reduce_scatter moves 2.00 x the best algorithm's bytes, as its source code predicts: it is "
        "implemented as an all_reduce of all data"
    )
    assert deviation("all_gather", wire_of(6, 3, 3)) == (
        "all_gather moves 2.00 x the best algorithm's bytes; 1.00 x was expected"
    )
    assert deviation("all_reduce", wire_of(0.1, 0.01, 0.01)) == ""  # too small to tell
    assert deviation("barrier", wire_of(0.001, 0, 0)) == ""
