"""How much of the communication is hidden: our overlap ratio, of one rank, from its trace.

    ratio = time in communication while computing / time in communication          0.0 nothing hidden ... 1.0 all of it

    in flight     ████████   ██████
    computing   ██████████████                both are unions of intervals: two collectives at once count once
    while           ████████   ██             here (8 + 2) / (8 + 6) = 0.71

This is the definition of Holistic Trace Analysis (`get_comm_comp_overlap`); ours is also taken step by step, and on
CPUs, of which that knows nothing. That leaves out a trace's last step and rounds kernels to whole microseconds inwards
unless told otherwise, which costs short kernels a percent.

On CUDA, communication is NCCL's kernels and computing every other kernel, on any stream; copies and memsets are
neither. A kernel belongs to the step whose host side launched it.

On a CPU, communication is the profiler's span of each collective of gloo's (`gloo:all_reduce` and so on): from when a
thread of gloo's takes it up to its end, the wait for slower ranks included, as in an NCCL kernel. Of a send or a
receive it ends when somebody has waited for it. Computing is the time in which some thread is within an operator:
`aten::...`, a node of the backward, a compiled region. The collective's own call, the engine's bookkeeping and Python
between operators are not computing. So what a synchronous all-reduce waits is not hidden: `allreduce` has 0.0.
"""

from dataclasses import dataclass

from muster.jobs.trace.events import Event, Step, Trace
from muster.jobs.trace.intervals import Intervals, difference, intersection, length, union
from muster.jobs.trace.kinds import is_communication_kernel
from muster.jobs.trace.nesting import Nested

BOOKKEEPING = ("autograd::engine::evaluate_function", "torch::autograd::AccumulateGrad")  # hooks run in these
CALLS = ("c10d::",)
COMPILED = ("Torch-Compiled Region", "## Call CompiledFxGraph")


@dataclass(frozen=True)
class Overlap:
    """Communication of a step or of several, in seconds; `hidden_s` of it passed while this rank computed."""

    communication_s: float
    hidden_s: float

    @property
    def ratio(self) -> float | None:
        """The overlap ratio; None where nothing was communicated."""
        return self.hidden_s / self.communication_s if self.communication_s > 0.0 else None


def overlap_of(communication: Intervals, computing: Intervals) -> Overlap:
    """Compare two unions of intervals in microseconds."""
    return Overlap(length(communication) / 1e6, length(intersection(communication, computing)) / 1e6)


def added(parts: list[Overlap]) -> Overlap:
    """Return the overlap of several steps as one."""
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
    """Return when any thread was within an operator that computes."""
    every: Intervals = []
    for events in trace.host.values():
        calls = union(_interval(each) for each in events if each.name.startswith(CALLS))
        operators = union(_interval(each) for each in events if _is_operator(each))
        every += difference(operators, calls)
    return union(every)


def _kernels(nested: Nested, step: Step) -> Intervals:
    """List the communication kernels that a step launched; without a launch in the trace their own time decides."""
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
