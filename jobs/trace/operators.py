"""Sum up CPU and CUDA time by operator, by kernel, by kind, and by phase of the step.

    total   time from start to end of an operator, with all calls inside it; a nested call of the same name adds nothing
    self    the same without the calls inside it; on CUDA: time of the kernels that it launched itself

Operators count if they began within a recorded step, kernels if they were launched within one.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from muster.jobs.trace.events import Event, ProfiledStep, Trace
from muster.jobs.trace.kinds import COMMUNICATION, DECISIVE, MATMUL, OTHER, kind_of
from muster.jobs.trace.nesting import Nested, NestedEvent

COUNTED = frozenset({"cpu_op", "user_annotation"})


@dataclass
class Operator:
    """The total of all operators, ranges or kernels of one name over the recorded steps. Kernels have no CPU time."""

    name: str
    kind: str
    calls: int = 0
    cpu_total_us: float = 0.0
    cpu_self_us: float = 0.0
    cuda_total_us: float = 0.0
    cuda_self_us: float = 0.0


def operators_of(nested: Nested) -> list[Operator]:
    """Sum up operators and ranges by name, sorted by CUDA time, then CPU time, largest first."""
    found: dict[str, Operator] = {}
    for node in nested.nodes:
        event = node.event
        if event.category not in COUNTED or step_at(nested.trace.steps, event.start_us) is None:
            continue
        row = found.setdefault(event.name, Operator(event.name, kind_of(event.name)))
        row.calls += 1
        row.cpu_self_us += node.self_us
        if not node.is_inside_its_like():
            row.cpu_total_us += event.duration_us
    for event, launch in nested.launched():
        _charge(found, event, launch, nested.trace.steps)
    return sorted(found.values(), key=lambda row: (-row.cuda_total_us, -row.cpu_total_us, row.name))


def _charge(found: dict[str, Operator], event: Event, launch: NestedEvent | None, steps: list[ProfiledStep]) -> None:
    """Add a kernel's time to the operators around its launch."""
    if launch is None or step_at(steps, launch.event.start_us) is None:
        return
    around = [node.event.name for node in launch.path() if node.event.category in COUNTED]
    for name in set(around):
        found[name].cuda_total_us += event.duration_us
    if around:
        found[around[-1]].cuda_self_us += event.duration_us


def kernels_of(nested: Nested) -> list[Operator]:
    """Sum up device events by name, largest time first."""
    found: dict[str, Operator] = {}
    for event, launch in nested.launched():
        if step_at(nested.trace.steps, event.start_us if launch is None else launch.event.start_us) is None:
            continue
        row = found.setdefault(event.name, Operator(event.name, kind_on_device(event, launch)))
        row.calls += 1
        row.cuda_total_us += event.duration_us
        row.cuda_self_us += event.duration_us
    return sorted(found.values(), key=lambda row: (-row.cuda_total_us, row.name))


def kind_on_device(event: Event, launch: NestedEvent | None) -> str:
    """Return a kernel's kind: that of the innermost DECISIVE operator around its launch, else that of its own name."""
    own = kind_of(event.name)
    if launch is None or event.category != "kernel" or own == COMMUNICATION:
        return own
    around = (kind_of(node.event.name) for node in reversed(launch.path()) if node.event.category == "cpu_op")
    return next((kind for kind in around if kind in DECISIVE), own)


def kinds_of(rows: Iterable[Operator]) -> dict[str, float]:
    """Sum the self time of operators or kernels by kind, in seconds, largest first."""
    seconds: dict[str, float] = {}
    for row in rows:
        seconds[row.kind] = seconds.get(row.kind, 0.0) + (row.cuda_self_us or row.cpu_self_us) / 1e6
    return dict(sorted(seconds.items(), key=lambda item: (-item[1], item[0])))


def matmul_share(kinds: dict[str, float]) -> float | None:
    """Return the share of matrix products in the time of all kinds but communication; None if that time is 0."""
    total = sum(seconds for kind, seconds in kinds.items() if kind != COMMUNICATION)
    return kinds.get(MATMUL, 0.0) / total if total > 0.0 else None


def phases_of(trace: Trace) -> dict[str, float]:
    """Return the host's seconds in each phase, summed over the recorded steps."""
    return _by_phase((span.phase, span.end_us - span.start_us) for step in trace.steps for span in step.spans)


def device_phases_of(nested: Nested) -> dict[str, float]:
    """Sum the seconds of device events by the phase that launched them. Events that overlap count in full."""
    found = launched_in_steps(nested)
    return _by_phase(
        (step.phase_at(launch.event.start_us) or OTHER, event.duration_us) for event, launch, step in found
    )


def device_spans_of(nested: Nested) -> dict[int, float]:
    """Map each step's number to the seconds from the start of its first device event to the end of its last one."""
    spans: dict[int, tuple[float, float]] = {}
    for event, _, step in launched_in_steps(nested):
        start_us, end_us = spans.get(step.number, (event.start_us, event.end_us))
        spans[step.number] = (min(start_us, event.start_us), max(end_us, event.end_us))
    return {number: (end_us - start_us) / 1e6 for number, (start_us, end_us) in spans.items()}


def launched_in_steps(nested: Nested) -> Iterator[tuple[Event, NestedEvent, ProfiledStep]]:
    """Yield the device events that were launched within a recorded step, each with its launch and the step."""
    for event, launch in nested.launched():
        if launch is not None and (step := step_at(nested.trace.steps, launch.event.start_us)) is not None:
            yield event, launch, step


def step_at(steps: Iterable[ProfiledStep], time_us: float) -> ProfiledStep | None:
    """Return the step that contains a time on the host, or None."""
    return next((step for step in steps if step.start_us <= time_us < step.end_us), None)


def _by_phase(rows: Iterable[tuple[str, float]]) -> dict[str, float]:
    seconds: dict[str, float] = {}
    for phase, duration_us in rows:
        seconds[phase] = seconds.get(phase, 0.0) + duration_us / 1e6
    return seconds
