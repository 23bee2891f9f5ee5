"""Closed forms beside the simulation and the cost of a ring that the formulas count."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.collectives_bench.cost.closed import RINGS, BestBucket, best_bucket, boundary_bytes, ring_of
from muster.collectives_bench.cost.formulas import cost


@pytest.mark.parametrize("operation", RINGS)
@given(ranks=st.integers(2, 1000), nbytes=st.integers(1, 10**12))
def test_a_ring_is_what_the_cost_model_counts(operation: str, ranks: int, nbytes: int) -> None:
    ring, counts = ring_of(operation, nbytes, ranks), cost(operation, nbytes, ranks=ranks, nodes=ranks)
    assert ring is not None
    assert (ring.steps, ring.sent_bytes) == (counts.steps, pytest.approx(counts.link_bytes))


def test_other_operations_and_a_rank_alone_have_none() -> None:
    assert ring_of("broadcast", 8, 4) is None
    assert ring_of("all_reduce", 8, 1) is None


@given(
    nbytes=st.integers(10**3, 10**11),
    bandwidth=st.floats(1e6, 1e12),
    overhead=st.floats(1e-6, 1e-1),
    other=st.floats(1.0, 1e5),
)
def test_no_number_of_buckets_costs_less_than_the_closed_form_s(
    nbytes: int, bandwidth: float, overhead: float, other: float
) -> None:
    form = BestBucket(nbytes, bandwidth, overhead)
    assert form.cost_s(form.buckets) <= form.cost_s(other) * (1 + 1e-9)
    assert form.bucket_bytes == pytest.approx(min((nbytes * bandwidth * overhead) ** 0.5, nbytes))


def test_bandwidth_and_overhead_are_those_of_a_line() -> None:
    form = best_bucket(4 * 10**8, lambda nbytes: 1e-3 + nbytes / 1e9, 4, host_s=1e-4)
    assert form is not None
    assert (form.bandwidth, form.overhead_s) == (pytest.approx(1e9), pytest.approx(1.1e-3, rel=1e-3))
    assert best_bucket(4 * 10**8, lambda nbytes: 1e-3, 4, host_s=0.0) is None, "free bytes have no best bucket"
    assert best_bucket(4, float, 4, host_s=0.0) is None


def test_a_forward_passes_every_boundary_once_a_sample() -> None:
    assert boundary_bytes(64, [1000] * 3, 4) == (4 - 1) * 64 * 4000
