"""Closed forms beside the cost of a ring that the formulas count, and beside other numbers of buckets."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.collectives_bench.cost.closed import RINGS, best_bucket, ring_of
from muster.collectives_bench.cost.formulas import cost


@pytest.mark.parametrize("operation", RINGS)
@given(ranks=st.integers(2, 1000), nbytes=st.integers(1, 10**12))
def test_a_ring_is_what_the_cost_model_counts(operation: str, ranks: int, nbytes: int) -> None:
    ring, counts = ring_of(operation, nbytes, ranks), cost(operation, nbytes, ranks=ranks, nodes=ranks)
    assert ring is not None
    assert (ring["steps"], ring["bytes_per_rank"]) == (counts.steps, pytest.approx(counts.link_bytes))


def test_other_operations_and_a_rank_alone_have_none() -> None:
    assert ring_of("broadcast", 8, 4) is None
    assert ring_of("all_reduce", 8, 1) is None


@given(
    nbytes=st.integers(10**4, 10**11),
    bandwidth=st.floats(1e6, 1e12),
    overhead=st.floats(1e-6, 1e-1),
    other=st.floats(1.0, 1e5),
)
def test_no_number_of_buckets_costs_less_than_the_closed_form_s(
    nbytes: int, bandwidth: float, overhead: float, other: float
) -> None:
    form = best_bucket(nbytes, lambda size: overhead + size / bandwidth, 4, host_s=1e-5)
    if form is None:  # so fast that its bytes are lost in rounding
        return
    s, w, o = form["bytes"], form["bandwidth"], form["overhead_s"]
    assert w == pytest.approx(bandwidth, rel=1e-3) or overhead * bandwidth > 1e10
    assert o == pytest.approx(overhead + 4 / bandwidth + 1e-5)
    assert form["cost_s"] <= (s / (w * other) + other * o) * (1 + 1e-9)
    assert form["bucket_bytes"] == pytest.approx(min((s * w * o) ** 0.5, s))


def test_free_bytes_and_a_single_gradient_have_no_best_bucket() -> None:
    assert best_bucket(4 * 10**8, lambda size: 1e-3, 4, host_s=0.0) is None
    assert best_bucket(4, float, 4, host_s=0.0) is None
