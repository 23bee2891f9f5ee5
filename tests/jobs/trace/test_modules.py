"""Which module an operator is part of, and what memory held at its peak: of drawn traces."""

from typing import Any

import pytest

from muster.jobs.trace.events import read_trace
from muster.jobs.trace.memory import HeldStorage, memory_of, thinned
from muster.jobs.trace.modules import modules_of
from muster.jobs.trace.nesting import Nested, nest_trace
from support.traces import event, kernels, lane, link, memory, steps

ENGINE = "autograd::engine::evaluate_function: "

#                     0123456789012345
STEP = [
    *steps("dffffffbbbbbbboo"),
    *lane("user_annotation", "module attention block.attention", ".###............"),
    *lane("user_annotation", "module norm block.attention.norm", "..#............."),
    *lane("cpu_op", "aten::linear", ".#.............."),
    *lane("cpu_op", "aten::layer_norm", "..#............."),
    *lane("cpu_op", "aten::cross_entropy_loss", "....#..........."),
    *lane("cpu_op", "aten::mul", ".....#.........."),  # in no module
    *lane("cpu_op", f"{ENGINE}NllLossBackward0", ".......#........"),
    *lane("cpu_op", "NllLossBackward0", ".......#........"),
    *lane("cpu_op", f"{ENGINE}AddmmBackward0", "........####...."),
    *lane("cpu_op", "AddmmBackward0", "........##......"),
    *lane("cpu_op", "c10d::allreduce_", "..........#....."),  # of a hook
    *lane("cpu_op", "aten::add_", "..............#."),  # of the optimizer
    *link(4.0, 7.0, 1),
    *link(1.0, 8.0, 2),
]


def nested(made: list[dict[str, Any]]) -> Nested:
    return nest_trace(read_trace(made))


def test_forward_and_backward_of_a_module_are_one_and_the_kinds_add_up_to_both_phases() -> None:
    found = modules_of(nested(STEP))
    assert found == pytest.approx({"attention": 40e-6, "norm": 10e-6, "loss": 20e-6, "other": 60e-6})
    assert sum(found.values()) == pytest.approx(130e-6)


def test_on_a_gpu_what_counts_are_the_kernels_that_a_module_launched() -> None:
    made = [
        *STEP,
        *kernels("gemm", "....................###", ".x", stream=7, first=1),  # runs later
        *kernels("layer_norm", "..........................##", "..x", stream=7, first=2),
        *kernels("gemm_backward", "..............................####", ".........x", stream=7, first=3),
        *kernels("ncclDevKernel_AllReduce", "..............................#", "..........x", stream=8, first=4),
        *kernels("adam", "......................................##", "..............x", stream=7, first=5),
    ]
    assert modules_of(nested(made)) == pytest.approx({"attention": 70e-6, "norm": 20e-6, "other": 0.0})


def test_of_a_pipeline_without_marked_phases_what_counts_is_the_time_within_modules_and_operators() -> None:
    marks = ("muster mark forward", "muster mark backward")
    made = [{**row, "name": "muster mark communication"} if row["name"] in marks else row for row in STEP]
    assert modules_of(nested(made)) == pytest.approx(
        {"attention": 40e-6, "norm": 10e-6, "loss": 20e-6, "other": 30e-6}  # operators and the engine, no waiting
    )


def test_without_marks_of_modules_nothing_is_known_and_a_foreign_range_is_no_module() -> None:
    foreign = event("user_annotation", "module <script>alert(1)</script> x", 10.0, 30.0)
    made = [row for row in STEP if not row["name"].startswith("module ")]
    assert modules_of(nested([*made, foreign])) == {}


def test_the_peak_is_the_largest_total_and_what_is_alive_there_is_named() -> None:
    state = [HeldStorage("parameters", 1, 100), HeldStorage("gradients", 2, 50), HeldStorage("optimizer", 3, 10)]
    changes = [
        *((-1.0, 9, 5), (1.5, 10, 1000), (2.5, 11, 300), (4.5, 12, 500), (6.0, 11, -300)),
        *((8.5, 13, 200), (12.0, 10, -1000), (13.0, 2, 50), (20.0, 14, 10**9)),  # the last is after the step
    ]
    found = memory_of(nested([*STEP, *memory(*changes)]), state, state)
    totals = [total for _, total in found["memory_over_time"]]
    # The gradients were freed unseen: their address is allocated anew, so what lay there before does not count.
    assert totals == [115, 1115, 1415, 1915, 1615, 1815, 815, 865]
    assert [tuple(row.values()) for row in found["allocations"]] == [
        (1000, "aten::linear", "block.attention", 1, pytest.approx(105e-6)),
        (500, "aten::cross_entropy_loss", "", 1, pytest.approx(115e-6)),
        (300, "aten::layer_norm", "block.attention.norm", 1, pytest.approx(35e-6)),
        (100, "parameters", "", 0, pytest.approx(160e-6)),
        (10, "optimizer", "", 0, pytest.approx(160e-6)),
        (5, "", "", 1, pytest.approx(170e-6)),
    ]


def test_on_a_gpu_the_allocator_s_own_totals_count_and_the_host_s_memory_does_not() -> None:
    made = [
        *STEP,
        *kernels("gemm", "....................###", ".x", stream=7, first=1),
        *memory((1.0, 5, 77), (3.0, 5, -77)),
        *memory((1.5, 10, 1000), (3.5, 1, -100), (8.5, 11, 300), (13.0, 11, -300), device=1, before=4000),
    ]
    found = memory_of(nested(made), [HeldStorage("gradients", 1, 100), HeldStorage("parameters", 2, 900)], [])
    assert [total for _, total in found["memory_over_time"]] == [4000, 5000, 4900, 5200, 4900]
    told = [(row["bytes"], row["operator"], row["module"]) for row in found["allocations"]]
    assert told == [
        (1000, "aten::linear", "block.attention"),
        (900, "parameters", ""),
        (300, "AddmmBackward0", "block.attention"),
    ]


def test_without_events_of_memory_nothing_is_said() -> None:
    assert memory_of(nested(STEP), [], []) == {}


def test_thinned_points_keep_the_order_and_the_extremes() -> None:
    points = [(at / 10, (at * 7919) % 10_007) for at in range(9_000)]
    kept = thinned(points)
    assert len(kept) <= 2000
    assert kept == sorted(kept)
    assert {max(points, key=lambda each: each[1]), min(points, key=lambda each: each[1])} <= {*kept}
    assert thinned(points[:2000]) == points[:2000]
