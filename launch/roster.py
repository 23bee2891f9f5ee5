"""Who has come, who is still at work, and who is late: the bookkeeping of one attempt."""

import math
from dataclasses import dataclass, field
from typing import Final

from jobs.errors import MusterError
from jobs.placement import Placement
from launch.channel import Channel, Message

NAMED: Final = 4  # ranks that a message names before it only counts


@dataclass
class ClockOffset:
    """How far a node's clock is ahead of ours, from the exchange that travelled fastest (NTP, RFC 5905, section 8)."""

    seconds: float = 0.0
    travel_s: float = math.inf

    def note(self, *, sent: float, heard: float, answered: float, received: float) -> None:
        """Take an exchange into account: `sent` and `received` by our clock, `heard` and `answered` by the node's."""
        travel_s = (received - sent) - (answered - heard)
        if travel_s < self.travel_s:
            self.seconds, self.travel_s = ((heard - sent) + (answered - received)) / 2, travel_s


@dataclass
class Node:
    """What is known of one node."""

    channel: Channel | None = None
    hello: Message = field(default_factory=dict)
    reached: Message = field(default_factory=dict)
    heard: float = 0.0  # monotonic seconds
    clock: ClockOffset = field(default_factory=ClockOffset)
    failure: MusterError | None = None  # why its agent could not be started
    swept: bool = False
    gone: bool = False


class Roster:
    """The nodes and ranks of an attempt. `meets`: every rank will report that it arrived, and that it joined."""

    def __init__(self, placement: Placement, *, meets: bool) -> None:
        self.meets = meets
        self.nodes = [Node() for _ in placement.nodes]
        self.hosts = [node.host for node in placement.nodes]
        self.missing = len(self.nodes)  # nodes that have neither answered nor failed
        self.node_of = {rank: node.node_rank for node in placement.nodes for rank in node.rank_range}
        self.running = set(self.node_of)
        self.arrived: set[int] = set()
        self.joined: set[int] = set()

    def late(self, limit_s: float, *, patient: bool) -> str:
        """Say, after the deadline, who has not come; empty when everybody is where they should be.

        While `patient`, ranks that have arrived are given a moment more: their own time-out says more than ours.
        """
        limit = f"{limit_s:g} s (start_timeout_s)"
        if silent := [number for number, node in enumerate(self.nodes) if not node.hello]:
            return f"{self._name_nodes(silent)}: the agent did not answer within {limit}"
        # A program of the user's need not meet anybody; but once one rank waits at the store, all others should come.
        expected = self.meets or bool(self.running & self.arrived)
        if expected and (missing := sorted(self.running - self.arrived)):
            names = self._name(missing)
            return f"{names} did not reach the rendezvous within {limit}; see muster logs --rank {missing[0]}"
        if self.meets and not patient and (apart := sorted(self.running - self.joined)):
            return f"{self._name(apart)} did not meet the others within {limit}"
        return ""

    def _name_nodes(self, numbers: list[int]) -> str:
        names = ", ".join(f"{number} ({self.hosts[number]})" for number in numbers[:NAMED])
        return f"node {names}" + (f" and {len(numbers) - NAMED} more" if len(numbers) > NAMED else "")

    def _name(self, ranks: list[int]) -> str:
        names = [f"rank {rank} on node {self.node_of[rank]}" for rank in ranks[:NAMED]]
        more = f" and {len(ranks) - NAMED} more" if len(ranks) > NAMED else ""
        host = self.nodes[self.node_of[ranks[0]]].hello.get("host", "?")
        return ", ".join(names) + more + f" ({host})"
