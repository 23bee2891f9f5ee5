"""Nest the events of each thread by time, and find the event that launched each kernel.

The stacks in a trace are optional (`profile: {stacks: true}`) and have Python frames only. Nesting by time works for
every trace, on CPU and CUDA.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from muster.jobs.trace.events import LAUNCHES, Event, Trace


@dataclass(slots=True)
class NestedEvent:
    """An event of a thread, and the event around it (`parent`). `inside_us`: the total time of its children."""

    event: Event
    parent: "NestedEvent | None"
    inside_us: float = 0.0

    @property
    def self_us(self) -> float:
        """The event's time without that of its children."""
        return max(0.0, self.event.duration_us - self.inside_us)

    def path(self) -> list["NestedEvent"]:
        """Return the nodes from the outermost one to this one."""
        nodes: list[NestedEvent] = []
        node: NestedEvent | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def is_inside_its_like(self) -> bool:
        """Return True if an enclosing event has the same name, and so already includes this event's time."""
        node = self.parent
        while node is not None:
            if node.event.name == self.event.name:
                return True
            node = node.parent
        return False


def nest(events: Sequence[Event]) -> list[NestedEvent]:
    """Nest the events of one thread; parents come before their children.

    Times in a trace are rounded, so an event that begins inside another one counts as its child even if it ends later.
    """
    nodes: list[NestedEvent] = []
    open_: list[NestedEvent] = []
    for event in sorted(events, key=lambda each: (each.start_us, -each.end_us)):
        while open_ and open_[-1].event.end_us <= event.start_us:
            open_.pop()
        parent = open_[-1] if open_ else None
        if parent is not None:
            parent.inside_us += min(event.end_us, parent.event.end_us) - event.start_us
        node = NestedEvent(event, parent)
        nodes.append(node)
        open_.append(node)
    return nodes


@dataclass(frozen=True)
class Nested:
    """A trace with its host events nested, and with its launches by correlation."""

    trace: Trace
    nodes: list[NestedEvent]
    launches: dict[int, NestedEvent]

    def launched(self) -> Iterator[tuple[Event, NestedEvent | None]]:
        """Yield each device event with the call that launched it, or with None if the trace has no launches at all.

        Events that were launched before the recording began belong to an earlier step and are left out.
        """
        for event in self.trace.device:
            launch = None if event.correlation is None else self.launches.get(event.correlation)
            if launch is not None or not self.launches:
                yield event, launch


def nest_trace(trace: Trace) -> Nested:
    """Nest every thread of a trace."""
    nodes = [node for _, events in sorted(trace.host.items(), key=_by_lane) for node in nest(events)]
    launches = {
        node.event.correlation: node
        for node in nodes
        if node.event.category in LAUNCHES and node.event.correlation is not None
    }
    return Nested(trace, nodes, launches)


def _by_lane(item: tuple[object, object]) -> str:
    return str(item[0])
