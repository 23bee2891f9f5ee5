"""Who has come, who is still at work, and who is late: the bookkeeping of one attempt."""

from dataclasses import dataclass, field
from typing import Final

from jobs.placement import Placement
from launch.channel import Channel, Message

NAMED: Final = 4  # ranks that a message names before it only counts


@dataclass
class Node:
    """What is known of one node."""

    channel: Channel | None = None
    hello: Message = field(default_factory=dict)
    heard: float = 0.0  # monotonic seconds
    swept: bool = False
    gone: bool = False


class Roster:
    """The nodes and ranks of an attempt. `meets`: every rank will report that it arrived, and that it joined."""

    def __init__(self, placement: Placement, *, meets: bool) -> None:
        self.meets = meets
        self.nodes = [Node() for _ in placement.nodes]
        self.node_of = {rank: node.node_rank for node in placement.nodes for rank in node.rank_range}
        self.running = set(self.node_of)
        self.arrived: set[int] = set()
        self.joined: set[int] = set()

    def late(self, limit_s: float, *, patient: bool) -> str:
        """Say, after the deadline, who has not come; empty when everybody is where they should be.

        While `patient`, ranks that have arrived are given a moment more: their own time-out says more than ours.
        """
        limit = f"{limit_s:g} s (start_timeout_s)"
        if silent := [str(number) for number, node in enumerate(self.nodes) if not node.hello]:
            return f"node {', '.join(silent)}: the agent did not answer within {limit}"
        # A program of the user's need not meet anybody; but once one rank waits at the store, all others should come.
        expected = self.meets or bool(self.running & self.arrived)
        if expected and (missing := sorted(self.running - self.arrived)):
            names = self._name(missing)
            return f"{names} did not reach the rendezvous within {limit}; see muster logs --rank {missing[0]}"
        if self.meets and not patient and (apart := sorted(self.running - self.joined)):
            return f"{self._name(apart)} did not meet the others within {limit}"
        return ""

    def _name(self, ranks: list[int]) -> str:
        names = [f"rank {rank} on node {self.node_of[rank]}" for rank in ranks[:NAMED]]
        more = f" and {len(ranks) - NAMED} more" if len(ranks) > NAMED else ""
        host = self.nodes[self.node_of[ranks[0]]].hello.get("host", "?")
        return ", ".join(names) + more + f" ({host})"
