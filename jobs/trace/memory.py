"""Memory during the recorded steps and the largest allocations at its peak, from the profiler's memory events. Pure.

    bytes   ▁▃▅▇█▆▄▂▁▃▅▇█▆▄▂     every allocation and every free, of the CPU's allocator or of the GPU's
                ^ peak           the allocations that are alive here, the largest first

On a GPU, every event has the allocator's total. On a CPU, the profiler does not report the free of a tensor that was
allocated before the recording. So the state of the training (parameters, gradients, optimizer, buffers) is listed
before and after it. State in both lists counts at every point; state that was freed in between never counts.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, groupby
from typing import Any, Final, NamedTuple, TypeAlias

from muster.jobs.trace.events import MemoryEvent
from muster.jobs.trace.modules import ENGINE, Places
from muster.jobs.trace.nesting import Nested, NestedEvent

POINTS: Final = 2000
LARGEST: Final = 20
BEFORE: Final = 0  # the step given to allocations from before the recorded steps

Point: TypeAlias = tuple[float, int]  # seconds since the first recorded step began, bytes


class HeldStorage(NamedTuple):
    """A storage of the training's state: its kind (`parameters`, ...), address and size."""

    kind: str
    address: int
    bytes: int


def memory_of(nested: Nested, before: Iterable[HeldStorage], after: Iterable[HeldStorage]) -> dict[str, Any]:
    """Return `memory_over_time` and `allocations` of a record; {} if the profiler saw no allocation.

    `before` and `after` list the training's state when the recording began and when it ended.
    """
    steps, on_device = nested.trace.steps, nested.trace.has_device
    events = sorted(
        (each for each in nested.trace.memory if each.on_device == on_device), key=lambda each: each.time_us
    )
    if not steps or not events:
        return {}
    begin_us, end_us = steps[0].start_us, steps[-1].end_us
    events = [each for each in events if each.time_us < end_us]
    old = {each.address: each for each in (before if on_device else _unchanged(before, after, events))}

    if on_device:
        totals = [events[0].total - events[0].bytes, *(each.total for each in events)]
    else:
        totals = [*accumulate((each.bytes for each in events), initial=sum(each.bytes for each in old.values()))]
    first = bisect_left(events, begin_us, key=lambda each: each.time_us)
    times = [0.0, *((each.time_us - begin_us) / 1e6 for each in events[first:])]
    peak = max(range(first, len(totals)), key=totals.__getitem__)  # the number of events before the peak
    return {
        "memory_over_time": thinned(list(zip(times, totals[first:], strict=True))),
        "allocations": _largest(nested, events[:peak], events[peak:], old),
    }


def thinned(points: Sequence[Point], most: int = POINTS) -> list[Point]:
    """Keep at most `most` points: the smallest and the largest point of each of `most` / 2 equal bins."""
    if len(points) <= most:
        return list(points)
    size = -(-len(points) // (most // 2))
    kept = []
    for begin in range(0, len(points), size):
        part = points[begin : begin + size]
        kept += sorted({min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])})
    return kept


def _unchanged(
    before: Iterable[HeldStorage], after: Iterable[HeldStorage], events: Iterable[MemoryEvent]
) -> Iterable[HeldStorage]:
    """Return the storages that are in both lists, except those whose address was allocated again meanwhile."""
    allocated = {each.address for each in events if each.bytes > 0}
    return (each for each in {*before} & {*after} if each.address not in allocated)


def _largest(
    nested: Nested, until: Iterable[MemoryEvent], later: Iterable[MemoryEvent], old: Mapping[int, HeldStorage]
) -> list[dict[str, Any]]:
    """List the largest allocations that are alive after the events `until`; `later` has the events after those."""
    alive: dict[int, MemoryEvent | HeldStorage] = dict(old)
    for event in until:
        if event.bytes > 0:
            alive[event.address] = event
        else:
            alive.pop(event.address, None)
    freed: dict[int, float] = {}
    for event in later:
        if event.bytes < 0:
            freed.setdefault(event.address, event.time_us)
    steps, places = nested.trace.steps, Places(nested)
    lanes = {lane: [*nodes] for lane, nodes in groupby(nested.nodes, key=lambda node: node.event.lane)}
    found = []
    for each in sorted(alive.values(), key=lambda one: (-one.bytes, one.address))[:LARGEST]:
        if isinstance(each, HeldStorage):
            since_us, operator, module, step = steps[0].start_us, each.kind, "", BEFORE
        else:
            node, since_us = _innermost_at(lanes.get(each.lane, ()), each.time_us), each.time_us
            operator, module = _operator(node), places.of(node).name
            step = next((one.number for one in steps if since_us < one.end_us), BEFORE)
        alive_us = freed.get(each.address, steps[-1].end_us) - since_us
        row = {"bytes": each.bytes, "operator": operator, "module": module, "step": step}
        found.append({**row, "alive_s": max(alive_us, 0.0) / 1e6})
    return found


def _innermost_at(lane: Sequence[NestedEvent], time_us: float) -> NestedEvent | None:
    """Return the innermost node of a thread (`lane`) that contains a time."""
    place = bisect_right(lane, time_us, key=lambda node: node.event.start_us)
    node = lane[place - 1] if place else None
    while node is not None and node.event.end_us <= time_us:
        node = node.parent
    return node


def _operator(node: NestedEvent | None) -> str:
    """Return the name of the outermost operator around a node, inside its module or backward node."""
    name = ""
    while node is not None and not node.event.module_kind and not node.event.name.startswith(ENGINE):
        if node.event.category == "cpu_op":
            name = node.event.name
        node = node.parent
    return name
