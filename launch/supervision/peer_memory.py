"""The memory of a run's nodes for checkpoints: set up copying, follow it, and get a checkpoint before a restart.

    Start ──► KeepCopies ─► Keeping (port) … all ─► CopyTo        once per attempt
    Kept, Kept, … of every shard from two nodes ─► Complete       every memory_every_steps steps
    the attempt has failed ─► Fetch ─► Fetched (SHA-256) … all    the ranks read it from the memory of the nodes

`launch/supervision/copies.py` decides, this sends and receives. The other end is `launch/node/copies.py`.
"""

import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Final

from muster.jobs.basics.words import counted, spell_ranks
from muster.jobs.checkpoint.names import position
from muster.jobs.hosts import nodelist
from muster.launch.plan.plan import Context
from muster.launch.records.eventlog import EventLog
from muster.launch.supervision.copies import Holdings, InMemory, Slot, domains_of, partners
from muster.launch.supervision.run_nodes import RunNodes
from muster.launch.wire import messages as wire

LOOPBACK: Final = "127.0.0.1"
SLOWEST_BYTES_PER_S: Final = 20e6  # rate of the slowest expected network
Message = wire.Keeping | wire.Kept | wire.Fetched
OF_MEMORY: Final = (wire.Keeping, wire.Kept, wire.Fetched)
Chosen = dict[str, Any]  # as `jobs/saving/resume.py` reads it
Wait = Callable[[Callable[[], bool]], Awaitable[bool]]


class PeerMemory:
    """The memory of all nodes, which outlives attempts as their agents do."""

    def __init__(self, context: Context, run_nodes: RunNodes, log: EventLog) -> None:
        settings = context.job.checkpoint
        self.is_on = settings is not None and settings.memory_every_steps is not None
        self.run_nodes = run_nodes
        self.log = log
        self.holdings = Holdings()
        self.complete = ""  # the newest checkpoint of which every node has its parts
        self._domains = domains_of(map(nodelist.expand, context.site.failure_domains))
        self._secret = secrets.token_hex(32)
        self._addresses: dict[Slot, str] = {}
        self._ports: dict[Slot, int] = {}
        self._asked: set[Slot] = set()  # nodes that have not answered KeepCopies in this attempt
        self._since = 0  # the attempt of the last restart
        self._partners: Mapping[Slot, Slot | None] = {}
        self._said: set[str] = set()
        self._answers: dict[Slot, wire.Fetched] = {}
        self._fetching: set[Slot] = set()  # nodes that were ordered to prepare a checkpoint
        self._is_loading = False  # while nodes fetch a checkpoint, nothing is deleted
        self._is_newer = False  # a newer checkpoint became complete during the load
        self._begun: dict[str, float] = {}  # {checkpoint: when its first shard was reported, monotonic}

    # Copying --------------------------------------------------------------------------------------------------------

    def before_start(self, slot: Slot, context: Context) -> None:
        """Order a node to keep checkpoints in memory. Call this before its ranks are started."""
        if not self.is_on:
            return
        node = self.run_nodes.nodes[slot]
        address = node.reached.address if node.reached is not None else ""
        address = address or (node.hello.address if node.hello is not None else "")
        self._addresses[slot] = LOOPBACK if context.placement.one_host else address or node.place.host
        self._asked.add(slot)
        self.run_nodes.send(slot, wire.KeepCopies(context.attempt, self._secret, self._addresses[slot]))

    def take(self, slot: Slot, message: Message, attempt: int, slots: Sequence[Slot]) -> int | None:
        """Handle a node's message; return the step of a checkpoint that is now complete. `slots`: of the attempt.

        Raises:
            BadCheckpointError: if the message is invalid.
        """
        match message:
            case wire.Keeping():
                self._on_keeping(slot, message, attempt, slots)
            case wire.Kept() if message.name != self.complete and position(message.name)[1] < self._since:
                return None  # a rank of an earlier attempt wrote it while it was being stopped
            case wire.Kept():
                self.holdings.note(slot, message.name, message.writer, message.writers, message.sha256, message.bytes)
                return self._on_kept(message.name, attempt, slots)
            case wire.Fetched():
                self._answers[slot] = message
        return None

    def lose(self, slot: Slot) -> None:
        """Forget a lost node."""
        self.holdings.lose(slot)
        self._ports.pop(slot, None)
        self._asked.discard(slot)

    def _on_keeping(self, slot: Slot, message: wire.Keeping, attempt: int, slots: Sequence[Slot]) -> None:
        if message.attempt != attempt:
            return
        self._asked.discard(slot)
        self._ports[slot] = message.port
        if message.why:
            self._say(f"{self.run_nodes.nodes[slot].host}: {message.why}; nothing is copied into memory")
        if self._asked.isdisjoint(slots):
            self._pair(attempt, slots)

    def _pair(self, attempt: int, slots: Sequence[Slot]) -> None:
        """Tell every node of an attempt which node keeps its copies."""
        hosts = {slot: self.run_nodes.nodes[slot].place.host for slot in slots if self._ports.get(slot)}
        chosen = partners(hosts, self._domains)
        self._partners = chosen.of
        if len(set(hosts.values())) < 2:
            self._say(
                "checkpoint.memory_every_steps: all nodes are on one host, so copies of the state stay there; a "
                "restart after lost ranks uses them, but they are lost with the host"
            )
        elif chosen.together:
            shared = counted(chosen.together, "node")
            self._say(f"{shared} copy the state to a node that may fail together with them; use more failure domains")
        for slot, other in chosen.of.items():
            where = ("", "", 0)
            if other is not None:
                where = (hosts[other], self._addresses[other], self._ports[other])
            self.run_nodes.send(slot, wire.CopyTo(attempt, *where))

    def _on_kept(self, name: str, attempt: int, slots: Sequence[Slot]) -> int | None:
        found = position(name)
        self._begun = {each: at for each, at in self._begun.items() if each == name} or {name: time.monotonic()}
        if self.complete and found <= position(self.complete):
            return None
        if not self.holdings.is_safe(name, slots, self._partners):
            return None
        if self._is_loading:
            self._is_newer = True
            return None
        self.complete = name
        self.holdings.keep_from(name)
        for slot in self.run_nodes.alive():
            self.run_nodes.send(slot, wire.Complete(attempt, name))
        held = max(self.holdings.nbytes(slot) for slot in slots)
        pairs = ((slot, other) for slot, other in self._partners.items() if other is not None)
        sent = max((self.holdings.nbytes(slot, other) for slot, other in pairs), default=0)
        seconds = round(time.monotonic() - self._begun.pop(name, time.monotonic()), 3)
        cost = {"bytes": held, "sent": sent, "seconds": seconds}
        self.log.event("copied", attempt=attempt, step=found[0], checkpoint=name, **cost)
        return found[0]

    # A restart ------------------------------------------------------------------------------------------------------

    def newest_step(self) -> int:
        """Return the step of the newest checkpoint of which the living nodes have every shard; 0 if there is none."""
        return next((each.step for each in self.candidates(-1)), 0)

    def candidates(self, after: int) -> list[InMemory]:
        """List the checkpoints in memory that are newer than step `after`, newest first."""
        return [each for each in self.holdings.available(self.run_nodes.alive()) if each.step > after]

    def why_none(self) -> str:
        """Return why no checkpoint is available in memory; "" if one is."""
        if not self.is_on:
            return "checkpoint.memory_every_steps is not set"
        if self.candidates(-1):
            return ""
        return self.why_lost(-1) or "no checkpoint is complete in the memory of the nodes"

    async def load(
        self, until: Wait, after: int, attempt: int, slots: Sequence[Slot], limit_s: float, *, forgets: bool = False
    ) -> Chosen | None:
        """Choose a checkpoint newer than step `after`, and have the nodes of the next attempt get it.

        `until(condition)` waits, and returns False if the nodes are no longer those of the next attempt. `limit_s` is
        added to the time that the slowest expected network needs. If a newer checkpoint becomes complete meanwhile,
        choose it. `forgets`: if there is none, the next attempt begins without one, so delete them all.
        """
        why, tried = self.why_lost(after), set[str]()
        try:
            while found := next((each for each in self.candidates(after) if each.name not in tried), None):
                self._is_loading, self._is_newer = True, False
                deadline = time.monotonic() + self._fetch(found, attempt, slots) + limit_s
                if not await until(partial(self._is_decided, found, deadline)):
                    return None
                if self._is_newer:
                    continue
                tried.add(found.name)
                late = nodelist.fold(dict.fromkeys(self.run_nodes.hosts(sorted(self._fetching - self._answers.keys()))))
                chosen = self._fetched(found) or f"{late} did not get {found.name} in time"
                if not isinstance(chosen, str):
                    self._begin_from(found.name, attempt)
                    return chosen
                why = chosen
        finally:
            self._is_loading = False
        if why:
            self.log.tell("not_in_memory", attempt=attempt, why=why)
        if forgets:
            self._begin_from("", attempt)
        return None

    def _is_decided(self, found: InMemory, deadline: float) -> bool:
        return self._is_newer or self._fetched(found) is not None or time.monotonic() > deadline

    def _fetch(self, found: InMemory, attempt: int, slots: Collection[Slot]) -> float:
        """Order the nodes of the next attempt, and those with shards, to prepare its reading; return the time limit.

        One node collects the records of the shards, and the others get them there, so that messages stay short.
        """
        self._answers, self._fetching = {}, {*slots, *found.runs}
        holders = [slot for slot in found.runs if self._ports.get(slot)]
        table = tuple((self._addresses[slot], self._ports[slot], found.runs[slot]) for slot in holders)
        about = (attempt, found.name, self._secret, len(found.holders))
        collect = wire.Fetch(*about, collects=True, sources=table)
        rest = wire.Fetch(*about, collects=False, sources=tuple((at, port, ()) for at, port, _ in table[:1]))
        for slot in self._fetching:
            self.run_nodes.send(slot, collect if slot in holders[:1] else rest)
        return found.nbytes / SLOWEST_BYTES_PER_S

    def _fetched(self, found: InMemory) -> Chosen | str | None:
        """Return the checkpoint from which all nodes can continue, or why they cannot; None until all have answered."""
        answers = {slot: each for slot, each in self._answers.items() if each.name == found.name}
        for slot in self._fetching:
            node = self.run_nodes.nodes[slot]
            if slot in answers and answers[slot].why:
                return f"{node.host} could not get {found.name} from the memory of the nodes: {answers[slot].why}"
            if not node.is_alive:
                return f"{node.host} was lost before it got {found.name} from the memory of the nodes"
        if answers.keys() < self._fetching:
            return None
        digests = {each.sha256 for each in answers.values()}
        if len(digests) != 1:
            return f"the nodes have different contents of {found.name}"
        return {"checkpoint": found.name, "step": found.step, "sha256": digests.pop(), "memory": True}

    def _begin_from(self, name: str, attempt: int) -> None:
        """Delete all other checkpoints in memory; `name` is "" if the next attempt uses none of them."""
        self.complete, self._since = name, attempt
        for slot in self.run_nodes.alive():
            self.run_nodes.send(slot, wire.Complete(attempt, name, only=True))
        self.holdings.keep_from(name, only=True)

    def why_lost(self, after: int) -> str:
        """Return why the newest checkpoint in memory is lost; "" if it is not, or not newer than step `after`."""
        found = self.holdings.unavailable(self.complete, self.run_nodes.alive())
        if found is None or position(self.complete)[0] <= after:
            return ""
        writers, slots = found
        hosts = nodelist.fold(dict.fromkeys(self.run_nodes.hosts(sorted(slots))))
        return f"{self.complete} was in memory, but the shards of {spell_ranks(writers[:8])} were lost with {hosts}"

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self.log.tell("warning", text=text)
