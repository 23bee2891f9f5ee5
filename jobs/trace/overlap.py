"""The overlap ratio of one rank, from its trace: the share of its communication time in which it also computes.

    ratio = time in communication while computing / time in communication          0.0 nothing hidden ... 1.0 all of it

    in flight     ████████   ██████
    computing   ██████████████                both are unions of intervals: two collectives at once count once
    while           ████████   ██             here (8 + 2) / (8 + 6) = 0.71

The definition is that of Holistic Trace Analysis (`get_comm_comp_overlap`). This module also computes the ratio for
each step, and for CPUs, which HTA does not support. By default HTA omits the last step of a trace and rounds the bounds
of kernels inwards to whole microseconds. The rounding shortens brief kernels, so results can differ by a percent.

On CUDA, NCCL's kernels are communication, and every other kernel on any stream is computation. Copies and memsets are
neither. A kernel belongs to the step in which the host launched it.

On a CPU, communication is the profiler's span of each gloo collective (`gloo:all_reduce` and so on). The span begins
when a gloo thread starts the collective. Like an NCCL kernel, it includes the wait for slower ranks. The span of a send
or a receive ends when a thread has waited for it. Computation is the time in which any thread is within an operator:
`aten::...`, a node of the backward, or a compiled region. The call of the collective, the bookkeeping of the autograd
engine, and Python between operators are not computation. So mode `allreduce`, whose all-reduces are synchronous, has
ratio 0.0.
"""

from dataclasses import dataclass

from muster.jobs.trace.events import Event, ProfiledStep, Trace
from muster.jobs.trace.intervals import Intervals, difference, intersection, length, union
from muster.jobs.trace.kinds import is_communication_kernel
from muster.jobs.trace.nesting import Nested

BOOKKEEPING = ("autograd::engine::evaluate_function", "torch::autograd::AccumulateGrad")  # these events contain hooks
CALLS = ("c10d::",)
COMPILED = ("Torch-Compiled Region", "## Call CompiledFxGraph")


@dataclass(frozen=True)
class Overlap:
    """The communication time of one or more steps, and the part of it during which this rank also computed."""

    communication_s: float
    hidden_s: float

    @property
    def ratio(self) -> float | None:
        """The overlap ratio; None if there was no communication."""
        return self.hidden_s / self.communication_s if self.communication_s > 0.0 else None


def overlap_of(communication: Intervals, computing: Intervals) -> Overlap:
    """Compute the overlap of two sets of intervals in microseconds."""
    return Overlap(length(communication) / 1e6, length(intersection(communication, computing)) / 1e6)


def added(parts: list[Overlap]) -> Overlap:
    """Add up the overlaps of several steps."""
    return Overlap(sum(each.communication_s for each in parts), sum(each.hidden_s for each in parts))


def overlap_by_step(nested: Nested) -> list[Overlap]:
    """Return the overlap of every step of a trace."""
    trace = nested.trace
    if trace.has_device:
        computing = union(_interval(each) for each, _ in nested.launched() if _computes(each))
        return [overlap_of(union(_kernels(nested, step)), computing) for step in trace.steps]
    computing = computing_on_cpu(trace)
    flights = union(map(_interval, trace.in_flight))
    return [overlap_of(intersection(flights, [(step.start_us, step.end_us)]), computing) for step in trace.steps]


def computing_on_cpu(trace: Trace) -> Intervals:
    """Return the intervals in which any thread was within an operator that computes."""
    every: Intervals = []
    for events in trace.host.values():
        calls = union(_interval(each) for each in events if each.name.startswith(CALLS))
        operators = union(_interval(each) for each in events if _is_operator(each))
        every += difference(operators, calls)
    return union(every)


def _kernels(nested: Nested, step: ProfiledStep) -> Intervals:
    """List the communication kernels launched in a step or, if the trace has no launches, that started in the step."""
    found = []
    for event, launch in nested.launched():
        if event.category == "kernel" and is_communication_kernel(event.name):
            began_us = event.start_us if launch is None else launch.event.start_us
            if step.start_us <= began_us < step.end_us:
                found.append(_interval(event))
    return found


def _computes(event: Event) -> bool:
    return event.category == "kernel" and not is_communication_kernel(event.name)


def _is_operator(event: Event) -> bool:
    if event.category == "cpu_op":
        return not event.name.startswith((*BOOKKEEPING, *CALLS))
    return event.name.startswith(COMPILED)


def _interval(event: Event) -> tuple[float, float]:
    return event.start_us, event.end_us
