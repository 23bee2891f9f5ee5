"""Time by kind of module: find the module of each operator, in the forward and in the backward.

    modules    block1.attention ───────────────── block1.mlp ──────       ranges that the recorder sets around forwards
    operators  aten::linear ─── aten::softmax ─── aten::linear ────
                     │ the profiler's link from forward to backward
    backward         └────────────→ AddmmBackward0 ───                   part of block1.attention, too

On a CPU, the times of all kinds add up to the phases forward and backward, or to the time within operators and modules
in a pipeline, which does not mark these phases. On a GPU, they add up to the time of all kernels, without communication
and without the phases data and optimizer. Hooks in the backward and the accumulation of gradients are part of `other`.
"""

import re
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Final, NamedTuple

from muster.jobs.trace.events import Event, Trace
from muster.jobs.trace.intervals import Interval, Intervals, difference, intersection, length, union
from muster.jobs.trace.kinds import COMMUNICATION, OTHER, kind_of
from muster.jobs.trace.nesting import Nested, NestedEvent
from muster.jobs.trace.operators import kind_on_device, launched_in_steps

LOSS: Final = "loss"
ENGINE: Final = "autograd::engine::evaluate_function"
MARKED: Final = ("forward", "backward")
NO_FORWARD: Final = ("data", "optimizer")
_LOSSES: Final = re.compile(r"aten::(cross_entropy|nll_|\w+_loss|kl_div|binary_cross_entropy|_?fused_linear_cross)")


class ModulePlace(NamedTuple):
    """The module that an operator is part of."""

    kind: str
    name: str


OUTSIDE: Final = ModulePlace(OTHER, "")


class Places:
    """A lookup of the module of any node of a trace, with a cache."""

    def __init__(self, nested: Nested) -> None:
        self._known: dict[int, ModulePlace] = {}
        self._forward = forwards_of(nested)

    def of(self, node: NestedEvent | None) -> ModulePlace:
        """Return the innermost module around a node; for a backward node, the one around its forward node."""
        unknown = []
        while node is not None and id(node) not in self._known:
            unknown.append(node)
            node = node.parent
        around = OUTSIDE if node is None else self._known[id(node)]
        for each in reversed(unknown):
            around = self._known[id(each)] = self._within(each, around)
        return around

    def _within(self, node: NestedEvent, around: ModulePlace) -> ModulePlace:
        event, forward = node.event, self._forward.get(id(node))
        if event.module_kind:
            return ModulePlace(event.module_kind, event.name)
        if forward is not None:
            return self.of(forward)
        if kind_of(event.name) == COMMUNICATION:
            return OUTSIDE
        return ModulePlace(LOSS, around.name) if around.kind == OTHER and _LOSSES.match(event.name) else around


def forwards_of(nested: Nested) -> dict[int, NestedEvent]:
    """Map the id of each backward node to the forward node that the profiler links to it."""
    at: dict[tuple[object, float], NestedEvent] = {}
    for node in nested.nodes:
        if node.event.category == "cpu_op":
            at.setdefault((node.event.lane, node.event.start_us), node)
    found = {}
    for source, target in nested.trace.links:
        forward, backward = at.get(source), at.get(target)
        if forward is not None and backward is not None and forward.event.start_us < backward.event.start_us:
            found[id(backward)] = forward
    # A link ends at the event of the autograd engine, which includes hooks that communicate. Use the operator inside.
    for node in nested.nodes:
        around = node.parent
        if around is not None and id(around) in found and around.event.name == f"{ENGINE}: {node.event.name}":
            found[id(node)] = found.pop(id(around))
    return found


def modules_of(nested: Nested) -> dict[str, float]:
    """Return the seconds of each kind of module in the recorded steps, largest first; {} if no module is marked."""
    if not any(node.event.module_kind for node in nested.nodes):
        return {}
    places = Places(nested)
    seconds = _on_device(nested, places) if nested.trace.has_device else _on_host(nested, places)
    return dict(sorted(seconds.items(), key=lambda item: (-item[1], item[0])))


def _on_device(nested: Nested, places: Places) -> dict[str, float]:
    seconds = {OTHER: 0.0}
    for event, launch, step in launched_in_steps(nested):
        if step.phase_at(launch.event.start_us) in NO_FORWARD or kind_on_device(event, launch) == COMMUNICATION:
            continue
        kind = places.of(launch).kind
        seconds[kind] = seconds.get(kind, 0.0) + event.duration_us / 1e6
    return seconds


def _on_host(nested: Nested, places: Places) -> dict[str, float]:
    marked, every = _spans(nested.trace, MARKED), _spans(nested.trace, None)
    within = marked or difference(every, _spans(nested.trace, NO_FORWARD))
    stretches: dict[str, list[Interval]] = {}
    for kind, stretch in _stretches(nested.nodes, places):
        stretches.setdefault(kind, []).append(stretch)
    found = {kind: intersection(union(each), within) for kind, each in stretches.items()}
    of_modules = union(each for kind, intervals in found.items() if kind != OTHER for each in intervals)
    found[OTHER] = difference(marked or found.get(OTHER, []), of_modules)
    return {kind: length(intervals) / 1e6 for kind, intervals in found.items()}


def _spans(trace: Trace, phases: Iterable[str] | None) -> Intervals:
    spans = (span for step in trace.steps for span in step.spans)
    return union((span.start_us, span.end_us) for span in spans if phases is None or span.phase in phases)


def _stretches(nodes: Iterable[NestedEvent], places: Places) -> Iterator[tuple[str, Interval]]:
    """Yield intervals of each thread's time, each with the kind of module of the innermost event."""
    for _, lane in groupby((node for node in nodes if _counts(node.event)), key=lambda node: node.event.lane):
        open_: list[NestedEvent] = []
        at_us = 0.0
        for node in (*lane, None):
            until_us = float("inf") if node is None else node.event.start_us
            while open_ and open_[-1].event.end_us <= until_us:
                closed = open_.pop()
                yield places.of(closed).kind, (at_us, closed.event.end_us)
                at_us = max(at_us, closed.event.end_us)
            if node is not None:
                if open_:
                    yield places.of(open_[-1]).kind, (at_us, until_us)
                open_.append(node)
                at_us = until_us


def _counts(event: Event) -> bool:
    return event.category == "cpu_op" or bool(event.module_kind)
