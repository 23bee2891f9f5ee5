"""The overlap ratio against drawn traces whose ratio is known, and its properties."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.jobs.trace.events import read_trace
from muster.jobs.trace.nesting import nest_trace
from muster.jobs.trace.overlap import Overlap, added, overlap_by_step, overlap_of
from support.traces import kernels, lane, steps

NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def overlaps(events: list) -> list[Overlap]:
    return overlap_by_step(nest_trace(read_trace(events)))


def ratios(events: list) -> list[float | None]:
    return [each.ratio for each in overlaps(events)]


def cpu(*lanes: list) -> list:
    return [event for events in lanes for event in events]


def test_what_a_synchronous_all_reduce_waits_is_not_hidden() -> None:
    # The engine's bookkeeping and the call itself lie around the wait; neither is computing.
    made = cpu(
        steps("dffffbbbbcccco"),
        lane("cpu_op", "aten::linear", ".####.........", 1),
        lane("cpu_op", "MmBackward0", ".....####.....", 1),
        lane("cpu_op", "c10d::allreduce_", ".........###..", 1),
        lane("user_annotation", "gloo:all_reduce", ".........####.", 7),
        lane("cpu_op", "aten::add_", ".............#", 1),
    )
    assert ratios(made) == [0.0]


def test_collectives_during_the_backward_are_hidden_as_far_as_it_reaches() -> None:
    made = cpu(
        steps("ffbbbbbbcco"),
        lane("cpu_op", "MmBackward0", "..######...", 1),
        lane("user_annotation", "gloo:all_reduce", "....###....", 7),
        lane("user_annotation", "gloo:all_reduce", "......####.", 8),  # overlaps the first: counts once
    )
    assert overlaps(made) == [Overlap(60e-6, 40e-6)]


def test_a_hook_that_waits_inside_the_engine_s_bookkeeping_hides_nothing() -> None:
    made = cpu(
        steps("fbbbbbo"),
        lane("cpu_op", "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", ".#####.", 1),
        lane("cpu_op", "torch::autograd::AccumulateGrad", ".#####.", 1),
        lane("user_annotation", "gloo:all_reduce", "..####.", 7),
    )
    assert ratios(made) == [0.0]


def test_a_call_inside_an_operator_is_not_computing() -> None:
    made = cpu(
        steps("fbbbbbo"),
        lane("cpu_op", "ReducerBackward", ".#####.", 1),
        lane("cpu_op", "c10d::allreduce_", "..##...", 1),
        lane("user_annotation", "gloo:all_reduce", "..####.", 7),
    )
    assert ratios(made) == [0.5]


def test_every_step_has_its_own_and_what_lies_between_them_has_none() -> None:
    made = cpu(
        steps("fbbco  fbbco", first=6),
        lane("cpu_op", "MmBackward0", ".##.....##..", 1),
        lane("user_annotation", "gloo:all_reduce", "..##.##.###.", 7),
    )
    assert ratios(made) == [0.5, pytest.approx(2 / 3)]
    assert added(overlaps(made)).ratio == pytest.approx(3 / 5)


def test_a_step_without_communication_has_no_ratio() -> None:
    assert ratios(cpu(steps("fbo"), lane("cpu_op", "aten::mm", "##."))) == [None]


def test_on_cuda_kernels_count_and_copies_do_not() -> None:
    compute = kernels("sm90_gemm", "...####.###...", "x......x......", stream=7, first=1)
    reduce = kernels(NCCL, ".....####.....", "..x...........", stream=20, first=11)
    copies = [{**each, "cat": "gpu_memcpy"} if each["cat"] == "kernel" else each for each in
              kernels("Memcpy DtoD", ".......#......", "...x..........", stream=9, first=21)]  # fmt: skip
    host = lane("cpu_op", "aten::mm", "##############")  # however busy the host is
    assert overlaps([*steps("ffffffffffffff"), *compute, *reduce, *copies, *host]) == [Overlap(40e-6, 30e-6)]


def test_a_kernel_belongs_to_the_step_that_launched_it() -> None:
    """The host runs ahead: NCCL's kernel of step 1 runs while the host is in step 2 already."""
    compute = kernels("gemm", "....####..", "x.........", stream=7, first=1)
    reduce = kernels(NCCL, "......##..", "..x.......", stream=20, first=11)
    assert ratios([*steps("ffff ffff"), *compute, *reduce]) == [1.0, None]


EVENTS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)).map(sorted), max_size=15)


@given(EVENTS, EVENTS)
def test_the_ratio_is_a_share_and_more_computing_never_lowers_it(communication: list, computing: list) -> None:
    def made(operators: list) -> list:
        flights = [lane("user_annotation", "gloo:all_reduce", "." * a + "#" * (b - a), 7) for a, b in communication]
        work = [lane("cpu_op", "aten::mm", "." * a + "#" * (b - a), 1) for a, b in operators]
        return cpu(steps("f" * 60), *flights, *work)

    ratio = ratios(made(computing))[0]
    if not any(start < end for start, end in communication):
        assert ratio is None
        return
    assert ratio is not None
    assert 0.0 <= ratio <= 1.0
    assert ratios(made(computing[:-1]))[0] <= ratio
    assert ratios(made([(0, 60)])) == [pytest.approx(1.0)]
    assert ratios(made([])) == [0.0]


def test_the_example_of_the_docstring() -> None:
    assert overlap_of([(4, 12), (15, 21)], [(0, 14), (19, 21)]).ratio == pytest.approx(10 / 14)
