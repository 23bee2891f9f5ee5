"""From settings to cells, and their order in each launch."""

from muster.collectives_bench.plan import cells_of, order_of
from muster.collectives_bench.settings import BenchSettings


def settings(**values) -> BenchSettings:
    return BenchSettings.model_validate({"operation": ["all_reduce"], "sizes": ["1M"], **values})


def test_a_cell_for_every_operation_type_call_place_and_size_in_the_order_of_a_table() -> None:
    asked = settings(operation=["all_gather", "barrier"], sizes=["1M", "4M"], dtypes=["fp32", "bf16"], places="both")
    cells = [(each.operation, each.dtype, each.place, each.asked_bytes >> 20) for each in cells_of(asked, 2)]
    assert cells == [
        ("all_gather", "fp32", "out", 1),
        ("all_gather", "fp32", "out", 4),
        ("all_gather", "fp32", "in", 1),
        ("all_gather", "fp32", "in", 4),
        ("all_gather", "bf16", "out", 1),
        ("all_gather", "bf16", "out", 4),
        ("all_gather", "bf16", "in", 1),
        ("all_gather", "bf16", "in", 4),
        ("barrier", "fp32", "in", 0),  # no size, and no type that matters
    ]


def test_sizes_that_come_to_the_same_in_whole_chunks_are_measured_once() -> None:
    asked = settings(operation=["all_reduce", "all_gather"], sizes=[8, 16, 64])
    assert [(each.operation, each.asked_bytes) for each in cells_of(asked, 4)] == [
        ("all_reduce", 8),
        ("all_reduce", 16),
        ("all_reduce", 64),
        ("all_gather", 8),  # 16 bytes: one element of each rank's, as for 16
        ("all_gather", 64),
    ]


def test_all_leaves_out_what_needs_more_ranks_and_a_place_that_is_not_there_is_the_usual_one() -> None:
    names = {each.operation for each in cells_of(settings(operation=["all"], places="out"), 1)}
    assert "send_recv" not in names
    assert "all_reduce" in names
    (cell,) = cells_of(settings(places="out"), 2)
    assert cell.place == "in"


def test_every_launch_has_another_order_and_all_ranks_have_the_same() -> None:
    cells = cells_of(settings(operation=["all"], sizes=["1M", "4M", "16M"]), 2)
    orders = [order_of(cells, launch, seed=3) for launch in range(4)]
    assert all(sorted(order) == list(range(len(cells))) for order in orders)
    assert len({tuple(order) for order in orders}) == 4
    assert order_of(cells, 2, seed=3) == orders[2]
    assert order_of(cells, 2, seed=4) != orders[2]
