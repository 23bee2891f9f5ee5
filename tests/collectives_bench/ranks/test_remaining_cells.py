"""What a failure leaves to measure."""

from muster.collectives_bench.plan import cells_of, order_of
from muster.collectives_bench.ranks.remaining_cells import RemainingCells
from muster.collectives_bench.settings import BenchSettings

CELLS = cells_of(BenchSettings(operation=["all_reduce", "broadcast", "barrier"], sizes=[8, 16, 32]), 2)
ALL_REDUCE, BROADCAST, BARRIER = [0, 1, 2], [3, 4, 5], [6]


def test_a_launch_measures_every_cell_in_an_order_of_its_own() -> None:
    remaining = RemainingCells(CELLS, seed=5)
    for launch in range(3):
        assert remaining.begin(launch) == []
        assert remaining.left == order_of(CELLS, launch, 5)
        for cell in list(remaining.left):
            remaining.done(cell)
        assert remaining.left == []


def test_a_failure_takes_the_rest_of_its_operation_out_of_the_launch_and_no_other() -> None:
    remaining = RemainingCells(CELLS, seed=0)
    remaining.begin(0)
    remaining.done(4)
    assert remaining.failed(3) == [(5, "skipped: broadcast failed at 8 B in this launch")]
    assert sorted(remaining.left) == ALL_REDUCE + BARRIER
    assert remaining.begin(1) == []
    assert sorted(remaining.left) == ALL_REDUCE + BROADCAST + BARRIER


def test_after_two_launches_with_failures_an_operation_is_skipped_in_the_others() -> None:
    remaining = RemainingCells(CELLS, seed=0)
    for launch in (0, 1):
        remaining.begin(launch)
        remaining.failed(6)
    for launch in (2, 3):
        assert remaining.begin(launch) == [(6, "skipped: barrier failed in 2 launches")]
        assert sorted(remaining.left) == ALL_REDUCE + BROADCAST


def test_a_launch_that_does_not_start_is_tried_twice_and_after_two_such_launches_none_is_begun() -> None:
    remaining = RemainingCells(CELLS, seed=0)
    for launch in (0, 1):
        remaining.begin(launch)
        assert remaining.never_began("rank 1 has no memory") == []
        skipped = remaining.never_began("rank 1 has no memory")
        assert skipped == [(cell, "the launch did not start: rank 1 has no memory") for cell in range(7)]
        assert remaining.left == []
    reason = "skipped: no launch could start: rank 1 has no memory"
    assert remaining.begin(2) == [(cell, reason) for cell in range(7)]
    assert remaining.left == []
