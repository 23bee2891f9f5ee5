"""The nodes outside the current attempt: restart the agents of lost nodes, and decide when the run can grow.

    lost ──wait, start its agent──→ idle ──can it reach the master? ──yes──→ fit ──→ save, then an attempt with it
      ↑ └──────── no answer ───────┘  └────────────── no: wait ─────────────┘

Each wait is longer than the one before. Waits also grow with the node's losses, so that an unstable node
rarely interrupts the others.
"""

import time
from collections.abc import Collection
from typing import Final

from muster.jobs.basics.errors import MusterError, RefusedError, UnreachableError
from muster.launch.supervision.attempt import Attempt
from muster.launch.supervision.inbox import Failed, Inbox
from muster.launch.supervision.run_nodes import NodeState, RunNodes
from muster.launch.transports.base import LEASE_S, Transport
from muster.launch.wire.messages import Reached

REVIVE_S: Final = 2.0  # the shortest wait between two tries to use a node
MOST_TRIES: Final = 3  # maximum number of doublings for failed tries: the wait grows to 16 s
MOST_LOSSES: Final = 10  # maximum number of doublings for losses: after eleven losses the wait is half an hour
SETTLE_S: Final = 5.0  # how long to wait for more nodes before the run grows
ORPHANS_S: Final = 2.0  # time for the ranks of a dead agent to end
FENCE_S: Final = LEASE_S + 2.0  # time for the ranks of a silent agent to end: its lease, then its rank parent's kill


class Reserve:
    """Lost and idle nodes, by slot."""

    def __init__(self, run_nodes: RunNodes, transport: Transport, inbox: Inbox, *, remote: bool) -> None:
        self.run_nodes = run_nodes
        self.transport = transport
        self.inbox = inbox
        self.remote = remote
        self.needed = False  # True while the run cannot continue without a lost node
        self.errors: dict[int, MusterError] = {}  # {slot: why the last start of its agent failed}
        self.starting: set[int] = set()  # lost slots whose agent is being started
        self.asked: set[int] = set()  # idle slots that are testing whether they reach the master
        self.refused: set[int] = set()  # idle slots that cannot take part, as a warning has said
        self.fit: dict[int, float] = {}  # {idle slot that can take part: since when (monotonic)}

    def turn(self) -> None:
        """Forget the test results of the previous attempt."""
        self.asked, self.fit = set(), {}

    def tick(self, now: float, attempt: Attempt, used: Collection[int]) -> None:
        """Restart lost agents and test idle nodes when their wait is over. `used`: the current attempt's slots."""
        asks = used and attempt.startup.begun and not attempt.is_stopping
        for slot, node in enumerate(self.run_nodes.nodes):
            if slot in used or slot in self.starting or now < self._due(node):
                continue
            if not node.is_alive:
                if (node.gone or node.failure is not None) and not node.given_up:
                    self.starting.add(slot)
                    self.inbox.spawn(self._start(slot))
            elif not self.remote:
                self.fit.setdefault(slot, now)
            elif asks and slot not in self.asked and slot not in self.fit:
                self.asked.add(slot)
                self.run_nodes.send(slot, attempt.startup.reach())

    def ready(self, now: float, wanted: int) -> list[int]:
        """List the fit slots, once there are `wanted` of them or the first has been fit for SETTLE_S; else []."""
        fit = [slot for slot in self.fit if self.run_nodes.nodes[slot].is_alive]
        settled = fit and now - min(self.fit[slot] for slot in fit) >= SETTLE_S
        return fit if settled or len(fit) >= wanted else []

    def failed(self, slot: int, error: MusterError, now: float) -> bool:
        """Record that a node's agent could not be restarted; return False if no restart was in progress."""
        if slot not in self.starting:
            return False
        self.starting.discard(slot)
        self._in_vain(slot, now)
        node = self.run_nodes.nodes[slot]
        node.failure, node.given_up = error, not isinstance(error, UnreachableError)
        self.errors[slot] = error
        return True

    def give_up(self, why: str) -> None:
        """Stop trying to use lost nodes."""
        for slot, node in enumerate(self.run_nodes.nodes):
            if not node.is_alive and not node.given_up:
                self.starting.discard(slot)
                last = f"; last error: {self.errors[slot]}" if slot in self.errors else ""
                text = f"{node.place.host}: {why}{last}{node.printed()}"
                node.failure, node.given_up = UnreachableError(text), True

    def reached(self, slot: int, message: Reached, attempt: Attempt, used: Collection[int], now: float) -> None:
        """Handle an idle node's answer to `reach`."""
        if slot not in self.asked:
            return
        self.asked.discard(slot)
        if not self.asked:
            attempt.context.run.nonce("supervisor").unlink(missing_ok=True)
        node = self.run_nodes.nodes[slot]
        node.reached = message
        apart = message.storage != "shared" and attempt.startup.context.options.get("saving")
        wrong = attempt.startup.judge(node)
        if isinstance(wrong, RefusedError) and slot not in self.refused:
            self.refused.add(slot)
            attempt.startup.warn(f"{wrong}; the run does not use this node until then")
        if wrong is None and not apart:
            self.run_nodes.note_ways([*used, slot], [])
            self.refused.discard(slot)
            self.fit[slot] = now
        else:
            self.run_nodes.note_ways(list(used), [slot])
            self._in_vain(slot, now)

    def avoid(self, slots: Collection[int]) -> None:
        """Give up nodes on which a process cannot be killed, for the longest time."""
        for slot in slots:
            self.run_nodes.nodes[slot].losses = MOST_LOSSES
            self.run_nodes.lose(slot, time.monotonic())

    def _due(self, node: NodeState) -> float:
        """Return when to try a node again (monotonic seconds)."""
        doublings = max(min(node.losses - 1, MOST_LOSSES), min(node.tries, MOST_TRIES))
        wait_s = REVIVE_S * 2.0**doublings
        if self.needed:
            wait_s = REVIVE_S if node.tries else 0.0
        fence_s = (FENCE_S + node.late_s if node.silent else ORPHANS_S) * self.remote if node.gone else 0.0
        return max(node.tried + wait_s, node.lost_at + fence_s)

    def _in_vain(self, slot: int, now: float) -> None:
        node = self.run_nodes.nodes[slot]
        node.tries, node.tried = node.tries + 1, now

    async def _start(self, slot: int) -> None:
        self.run_nodes.nodes[slot].forget_agent()
        self.asked.discard(slot)
        self.fit.pop(slot, None)
        try:
            await self.transport.restart(slot, self.inbox)
        except MusterError as error:
            self.inbox.put(Failed(slot, error))
