"""The counts of every algorithm, against what textbooks, courses and interface counters say."""

import math

import pytest

from muster.collectives_bench.catalog import OPERATIONS
from muster.collectives_bench.cost.formulas import LIBRARIES, TEXTBOOK, Algorithm, Cost, algorithm_of, cost, rounds
from muster.jobs.basics.errors import UsageError

MB = 10**6
WORLDS = (2, 3, 4, 5, 8, 16)


def test_every_operation_of_the_catalog_has_an_algorithm_and_no_other_name_has_one() -> None:
    assert list(TEXTBOOK) == list(OPERATIONS)
    assert all(set(rows) <= set(OPERATIONS) for rows in LIBRARIES.values())


def test_eight_ranks_reduce_ten_billion_fp16_gradients_over_100_gbit_in_2_8_seconds() -> None:
    gradients = 10e9 * 2
    counts = cost("all_reduce", gradients, ranks=8, nodes=8)
    assert counts.link_bytes * 8 / 100e9 == pytest.approx(2.8)


@pytest.mark.parametrize("ranks", WORLDS)
def test_a_ring_sends_2_n_minus_1_chunks_of_s_over_n_in_as_many_steps(ranks: int) -> None:
    counts = cost("all_reduce", 1000.0, ranks=ranks)
    assert counts.steps == 2 * (ranks - 1)
    assert counts.link_bytes == pytest.approx(2 * (ranks - 1) * 1000 / ranks)
    assert counts.reduced_bytes == pytest.approx((ranks - 1) / ranks * 1000)


def test_five_megabytes_at_one_a_second_reach_seven_others_in_15_seconds_by_a_tree() -> None:
    def seconds(name: str, ranks: int) -> float:
        return TEXTBOOK[name](5 * MB, ranks, ranks).link_bytes / MB

    assert [seconds("tree_broadcast", ranks) for ranks in (2, 4, 8)] == [5, 10, 15]
    assert seconds("tree_reduce", 8) == 15


@pytest.mark.parametrize(("ranks", "buffers"), [(1, 0), (2, 1), (3, 2), (4, 3), (5, 4), (8, 6), (16, 10)])
def test_gloo_sends_to_all_children_of_its_tree_at_once_so_the_last_leaf_waits_longer(ranks: int, buffers: int) -> None:
    assert cost("broadcast", 100.0, ranks=ranks, nodes=ranks, backend="gloo").link_bytes == buffers * 100.0


@pytest.mark.parametrize(
    "operation", [name for name, each in OPERATIONS.items() if each.has_size and name != "ping_pong"]
)
@pytest.mark.parametrize("ranks", WORLDS)
def test_on_one_host_all_bytes_that_are_sent_are_those_of_the_catalog(operation: str, ranks: int) -> None:
    assert cost(operation, 960.0, ranks=ranks).host_bytes == pytest.approx(OPERATIONS[operation].wire(ranks) * 960.0)


def test_a_ping_pong_is_one_way_where_the_catalog_counts_both() -> None:
    assert 2 * cost("ping_pong", 960.0, ranks=2).host_bytes == OPERATIONS["ping_pong"].wire(2) * 960.0


@pytest.mark.parametrize(("ranks", "times"), [(2, 2.0), (3, 4.0), (4, 6.0)])
def test_gloos_reduce_scatter_moves_an_all_reduces_bytes(ranks: int, times: float) -> None:
    counts = cost("reduce_scatter", 1000.0, ranks=ranks, backend="gloo")
    assert counts.host_bytes == pytest.approx(times * 1000)
    assert counts.copied_bytes == pytest.approx(1000 + 1000 / ranks)


@pytest.mark.parametrize(("ranks", "seconds"), [(2, 1.44), (3, 1.63), (4, 1.71)])
def test_gloos_reduce_takes_the_links_as_long_as_it_did_in_a_box(ranks: int, seconds: float) -> None:
    """Measured at 32 MB and 1 Gbit/s, in units of the time of S on the link."""
    assert cost("reduce", 1.0, ranks=ranks, nodes=ranks, backend="gloo").link_bytes == pytest.approx(seconds, rel=0.05)


@pytest.mark.parametrize(
    "algorithm", {*TEXTBOOK.values(), *(each for rows in LIBRARIES.values() for each in rows.values())}
)
def test_counts_are_never_negative_and_bytes_scale_with_the_size(algorithm: Algorithm) -> None:
    for ranks, nodes in ((2, 1), (2, 2), (4, 2), (6, 3), (8, 8)):
        small, large = (algorithm(size, ranks, nodes) for size in (1e3, 1e6))
        for count in ("link_bytes", "reduced_bytes", "copied_bytes", "host_bytes", "host_reduced", "host_copied"):
            assert getattr(small, count) >= 0
            assert getattr(large, count) == pytest.approx(1000 * getattr(small, count))
        assert (large.steps, large.host_messages) == (small.steps, small.host_messages)


def test_ranks_of_a_node_share_its_link_where_all_send_to_all_and_not_in_a_ring() -> None:
    ring = cost("all_reduce", 800.0, ranks=8, nodes=2)
    assert ring.link_bytes == cost("all_reduce", 800.0, ranks=8, nodes=8).link_bytes
    assert cost("all_to_all", 800.0, ranks=8, nodes=2).link_bytes == pytest.approx(4 * 4 * 100)


def test_one_after_another_adds_all_counts() -> None:
    assert Cost(1, 2, 3, 4, 5, 6, 7, 8) + Cost(1, 1, 1, 1, 1, 1, 1, 1) == Cost(2, 3, 4, 5, 6, 7, 8, 9)


def test_a_rank_alone_costs_nothing_and_a_barrier_no_bytes() -> None:
    assert cost("all_reduce", 1e9, ranks=1) == Cost()
    assert cost("barrier", 1e9, ranks=5).link_bytes == 0
    assert cost("barrier", 1e9, ranks=5).steps == 3


@pytest.mark.parametrize("ranks", range(1, 70))
def test_rounds_are_the_logarithm_rounded_up(ranks: int) -> None:
    assert rounds(ranks) == math.ceil(math.log2(ranks))


def test_an_unknown_operation_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UsageError, match="did you mean 'all_reduce'"):
        algorithm_of("all_reduc")
