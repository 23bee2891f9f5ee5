"""Track the ranks of one attempt: which have joined, which are running, which are overdue."""

import time
from collections.abc import Callable, Sequence
from typing import Final

from muster.jobs.hosts.placement import Placement
from muster.launch.supervision.run_nodes import NodeState
from muster.launch.wire.codec import ProtocolError

SAY_S: Final = 60.0  # between two lines about ranks that have not reached the rendezvous
NAMED: Final = 4  # maximum number of ranks or nodes that a message names; of the rest it gives the number


class Roster:
    """The nodes and ranks of an attempt. `meets`: every rank reports when it has arrived and when it has joined."""

    def __init__(self, placement: Placement, nodes: Sequence[NodeState], *, meets: bool) -> None:
        self.meets = meets
        self.nodes = list(nodes)  # in the order of node ranks
        self.hosts = [node.host for node in placement.nodes]
        # node ranks that have not yet completed the current step of the start
        self.missing = set(range(len(self.nodes)))
        self.swept: set[int] = set()  # node ranks of nodes where no process of the attempt is left
        self._unswept = 0  # the node rank of a node that had not swept when last looked
        self.node_of = {rank: node.node_rank for node in placement.nodes for rank in node.rank_range}
        self.running = set(self.node_of)
        self.ended: set[int] = set()
        self.arrived: set[int] = set()
        self.joined: set[int] = set()
        self._met: float | None = None  # when the first rank of a program arrived (monotonic)
        self._said = 0.0  # when the last line about absent ranks was printed

    def waits_for_sweep(self) -> bool:
        """Return whether a node has not swept yet. Called after each message, so it begins with the node found last."""
        count = len(self.nodes)
        for each in range(self._unswept, self._unswept + count):
            node = self.nodes[each % count]
            if each % count not in self.swept and node.is_alive and node.hello is not None:
                self._unswept = each % count
                return True
        return False

    @property
    def next_rank(self) -> int:
        """A number that no rank of the attempt has."""
        return max(self.node_of) + 1

    def add_node(self, node: NodeState) -> None:
        """Add a node, whose ranks join the others."""
        self.nodes.append(node)
        self.hosts.append(node.place.host)

    def check_own(self, node_rank: int, *ranks: int) -> None:
        """Check that a node reports only about its own ranks.

        Raises:
            ProtocolError: if one of the ranks belongs to another node.
        """
        if foreign := [rank for rank in ranks if self.node_of.get(rank) != node_rank]:
            raise ProtocolError(f"it reports about rank {foreign[0]}, which it does not run")

    def end(self, rank: int) -> None:
        """Record the end of a rank.

        Raises:
            ProtocolError: if the rank has ended before.
        """
        if rank in self.ended:
            raise ProtocolError(f"rank {rank} has ended already")
        self.ended.add(rank)
        self.running.discard(rank)

    def late(self, limit_s: float, *, patient: bool) -> str:
        """Return which nodes or ranks are overdue, as text for a message; "" if none is. Call it after the deadline.

        While `patient`, ranks that have arrived get more time, because their own time-out has a better message.
        """
        limit = f"{limit_s:g} s (start_timeout_s)"
        if silent := [number for number, node in enumerate(self.nodes) if node.hello is None]:
            said = next(filter(None, (self.nodes[number].printed() for number in silent)), "")
            return f"{self.name_nodes(silent)}: the agent did not answer within {limit}{said}"
        if self.meets and (missing := sorted(self.running - self.arrived)):
            return f"{self._name(missing)} did not reach the rendezvous within {limit}"
        if self.meets and not patient and (apart := sorted(self.running - self.joined)):
            return f"{self._name(apart)} did not join the others within {limit}"
        return ""

    def absent(self, now: float, limit_s: float, say: Callable[[str], None]) -> str:
        """Return which ranks of a program have not reached the rendezvous in time; "" if there are none.

        A program need not meet, and may prepare data for long before it does. But once one of its ranks waits at the
        rendezvous, all others should arrive within `limit_s`. Until then, `say` gets a line each minute.
        """
        missing = sorted(self.running - self.arrived)
        if self.meets or not missing or not self.running & self.arrived:
            return ""
        if self._met is None:
            self._met = self._said = now
        if now - self._met >= limit_s:
            limit = f"{limit_s:g} s after the first rank (rendezvous_timeout_s)"
            return f"{self._name(missing)} did not reach the rendezvous within {limit}"
        if now - self._said >= SAY_S:
            self._said = now
            until = time.strftime("%H:%M:%S", time.localtime(time.time() + self._met + limit_s - now))
            say(f"waiting until {until} for {self._name(missing)} at the rendezvous")
        return ""

    def name_nodes(self, numbers: Sequence[int]) -> str:
        """Name the first few nodes, and count the others."""
        names = ", ".join(f"{number} ({self.hosts[number]})" for number in numbers[:NAMED])
        return f"node {names}" + (f" and {len(numbers) - NAMED} more" if len(numbers) > NAMED else "")

    def _name(self, ranks: list[int]) -> str:
        names = [f"rank {rank} on node {self.node_of[rank]}" for rank in ranks[:NAMED]]
        more = f" and {len(ranks) - NAMED} more" if len(ranks) > NAMED else ""
        host = self.nodes[self.node_of[ranks[0]]].host
        return ", ".join(names) + more + f" ({host})"
