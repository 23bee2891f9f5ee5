"""Which event ran inside which: by time, thread by thread; and which of them launched a kernel.

The profiler's own stacks are of Python's frames only and not always there; that one event lies within another on the
same thread holds for every trace, on CPU and CUDA, with Python's frames (`profile: {stacks: true}`) or without.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from muster.jobs.trace.events import LAUNCHES, Event, Trace


@dataclass(slots=True)
class Node:
    """An event of a thread, and what it ran in; `inside_us` is the time that its own children took."""

    event: Event
    parent: "Node | None"
    inside_us: float = 0.0

    @property
    def self_us(self) -> float:
        """Its time without that of its children."""
        return max(0.0, self.event.duration_us - self.inside_us)

    def path(self) -> list["Node"]:
        """Return the nodes from the outermost one to this."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def is_inside_its_like(self) -> bool:
        """True when an event of the same name lies around it: its time is in that one's."""
        node = self.parent
        while node is not None:
            if node.event.name == self.event.name:
                return True
            node = node.parent
        return False


def nest(events: Sequence[Event]) -> list[Node]:
    """Nest the events of one thread, parents before their children.

    One that ends after what it began in (the clock of the trace rounds) counts as inside it.
    """
    nodes: list[Node] = []
    open_: list[Node] = []
    for event in sorted(events, key=lambda each: (each.start_us, -each.end_us)):
        while open_ and open_[-1].event.end_us <= event.start_us:
            open_.pop()
        parent = open_[-1] if open_ else None
        if parent is not None:
            parent.inside_us += min(event.end_us, parent.event.end_us) - event.start_us
        node = Node(event, parent)
        nodes.append(node)
        open_.append(node)
    return nodes


@dataclass(frozen=True)
class Nested:
    """A trace with its host events nested, and every launch by its correlation."""

    trace: Trace
    nodes: list[Node]
    launches: dict[int, Node]

    def launched(self) -> Iterator[tuple[Event, Node | None]]:
        """Yield what ran on the device, each with the call that launched it, None in a trace that has no such calls.

        What was launched before the recording began is left out: the device was still busy with an earlier step.
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
