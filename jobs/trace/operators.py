"""Where the time went by name: operators by their CPU and CUDA time, kernels, kinds, and the phases of the steps.

    total   from an operator's begin to its end, with what it called; inside one of its own name it counts once
    self    without what it called; on CUDA what it launched itself

Only what ran, or was launched, within a recorded step counts.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from muster.jobs.trace.events import Event, Step, Trace
from muster.jobs.trace.kinds import COMMUNICATION, MATMUL, OTHER, TELLING, kind_of
from muster.jobs.trace.nesting import Nested, Node

COUNTED = frozenset({"cpu_op", "user_annotation"})


@dataclass
class Operator:
    """One name, summed over the recorded steps; a kernel has CUDA times only."""

    name: str
    kind: str
    calls: int = 0
    cpu_total_us: float = 0.0
    cpu_self_us: float = 0.0
    cuda_total_us: float = 0.0
    cuda_self_us: float = 0.0


def operators_of(nested: Nested) -> list[Operator]:
    """Sum up operators and ranges, those with the most CUDA time first, without CUDA those with the most CPU time."""
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


def _charge(found: dict[str, Operator], event: Event, launch: Node | None, steps: list[Step]) -> None:
    """Add a kernel's time to the operators that it was launched from."""
    if launch is None or step_at(steps, launch.event.start_us) is None:
        return
    around = [node.event.name for node in launch.path() if node.event.category in COUNTED]
    for name in set(around):
        found[name].cuda_total_us += event.duration_us
    if around:
        found[around[-1]].cuda_self_us += event.duration_us


def kernels_of(nested: Nested) -> list[Operator]:
    """Sum up what ran on the device, the longest first."""
    found: dict[str, Operator] = {}
    for event, launch in nested.launched():
        if step_at(nested.trace.steps, event.start_us if launch is None else launch.event.start_us) is None:
            continue
        row = found.setdefault(event.name, Operator(event.name, kind_on_device(event, launch)))
        row.calls += 1
        row.cuda_total_us += event.duration_us
        row.cuda_self_us += event.duration_us
    return sorted(found.values(), key=lambda row: (-row.cuda_total_us, row.name))


def kind_on_device(event: Event, launch: Node | None) -> str:
    """Return a kernel's kind: that of the operator that launched it where it tells, else by the kernel's own name."""
    own = kind_of(event.name)
    if launch is None or event.category != "kernel" or own == COMMUNICATION:
        return own
    around = (kind_of(node.event.name) for node in reversed(launch.path()) if node.event.category == "cpu_op")
    return next((kind for kind in around if kind in TELLING), own)


def kinds_of(rows: Iterable[Operator]) -> dict[str, float]:
    """Return seconds by kind, without what operators called: of kernels, or of operators where there are none."""
    seconds: dict[str, float] = {}
    for row in rows:
        seconds[row.kind] = seconds.get(row.kind, 0.0) + (row.cuda_self_us or row.cpu_self_us) / 1e6
    return dict(sorted(seconds.items(), key=lambda item: (-item[1], item[0])))


def matmul_share(kinds: dict[str, float]) -> float | None:
    """Return the share of matrix products in all that was computed; None where nothing was."""
    total = sum(seconds for kind, seconds in kinds.items() if kind != COMMUNICATION)
    return kinds.get(MATMUL, 0.0) / total if total > 0.0 else None


def phases_of(trace: Trace) -> dict[str, float]:
    """Return the host's seconds by phase, over all recorded steps."""
    return _by_phase((span.phase, span.end_us - span.start_us) for step in trace.steps for span in step.spans)


def device_phases_of(nested: Nested) -> dict[str, float]:
    """Return the device's busy seconds by the phase that launched it; streams side by side count both."""
    found = launched_in_steps(nested)
    return _by_phase(
        (step.phase_at(launch.event.start_us) or OTHER, event.duration_us) for event, launch, step in found
    )


def device_spans_of(nested: Nested) -> dict[int, float]:
    """Return, by step, the seconds from its first begin to its last end on the device; empty without one."""
    spans: dict[int, tuple[float, float]] = {}
    for event, _, step in launched_in_steps(nested):
        start_us, end_us = spans.get(step.number, (event.start_us, event.end_us))
        spans[step.number] = (min(start_us, event.start_us), max(end_us, event.end_us))
    return {number: (end_us - start_us) / 1e6 for number, (start_us, end_us) in spans.items()}


def launched_in_steps(nested: Nested) -> Iterator[tuple[Event, Node, Step]]:
    """Yield what ran on the device and was launched within a step, with its launch."""
    for event, launch in nested.launched():
        if launch is not None and (step := step_at(nested.trace.steps, launch.event.start_us)) is not None:
            yield event, launch, step


def step_at(steps: Iterable[Step], time_us: float) -> Step | None:
    """Return the step at a time of the host."""
    return next((step for step in steps if step.start_us <= time_us < step.end_us), None)


def _by_phase(rows: Iterable[tuple[str, float]]) -> dict[str, float]:
    seconds: dict[str, float] = {}
    for phase, duration_us in rows:
        seconds[phase] = seconds.get(phase, 0.0) + duration_us / 1e6
    return seconds
