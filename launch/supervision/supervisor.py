"""The supervisor: one per run, outside the ranks. It starts the agents, makes attempts, and leaves nothing behind.

    agents answer → attempt ──ended──→ recovery.decide ──again──→ wait, choose nodes and checkpoint → attempt …
                    (attempt.py)             └── the end → every agent is let go, and the verdict written down

Everything that happens comes through one inbox, in order; every wait has a deadline.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from muster.jobs.basics import exits
from muster.jobs.basics.errors import MusterError, RunFolderError, StorageError, UnreachableError
from muster.jobs.basics.words import counted
from muster.launch.common import processes
from muster.launch.common.limits import raise_open_files
from muster.launch.plan.plan import Context
from muster.launch.records.eventlog import EventLog
from muster.launch.records.lease import Lease
from muster.launch.records.verdict import Ending, Stop, Verdict, judge
from muster.launch.supervision import resumption
from muster.launch.supervision.attempt import Attempt, Send
from muster.launch.supervision.console import Console
from muster.launch.supervision.crew import REVIVE_S, SILENT_S, Crew
from muster.launch.supervision.inbox import (
    Event,
    Failed,
    Gone,
    Heard,
    Inbox,
    Loaded,
    Refused,
    StopRequest,
    Tick,
    requested,
)
from muster.launch.supervision.recovery import Choice, Decision
from muster.launch.supervision.story import last_advice
from muster.launch.supervision.succession import Succession
from muster.launch.transports.base import LEASE_S, Transport
from muster.launch.wire.messages import Heartbeat, Hello, StopRanks

ORPHANS_S: Final = 2.0  # for the ranks of an agent that has died to end after it
FENCE_S: Final = LEASE_S + 2.0  # for those of one that is only silent: its lease, and its keeper's kill

Cause = Callable[[Ending | None], Stop | None]


class Supervisor:
    """A run, from its first agent to its verdict."""

    def __init__(self, context: Context, transport: Transport, console: Console, cause: Cause | None = None) -> None:
        self.cause = cause  # what the world outside says of the end of a run, after a first failure
        self.transport = transport
        self.console = console
        self.context = context
        self.run_dir = context.run
        self.job = context.job
        self.log = EventLog(context.run, console.say)
        self.lease, self.inbox = Lease(context.run), Inbox()
        self.crew = Crew(context.crew)
        self.slots: tuple[int, ...] = tuple(range(len(context.placement.nodes)))  # of the attempt, by node rank
        self.rank_of = {slot: slot for slot in self.slots}  # the node rank of each of them
        self.attempt: Attempt | None = None
        self.succession = Succession(context.job, self.crew, saves=resumption.saves(context))
        self.stop: Stop | None = None  # what somebody has asked for
        self.request: float | None = None  # when `muster stop` was called last

    async def run(self) -> Verdict:
        """Make attempts to the end and record them; whatever happens, no process of the run is left."""
        began = time.time()
        raise_open_files()
        self.log.submitted(self.context, self.transport.name)
        self.inbox.listen_for_signals()
        try:
            verdict = await self._attempts()
        finally:
            await self._farewell()
        self.log.run_ended(self.context.attempt, verdict)
        self.lease.give_up()
        advice = last_advice(verdict, self.attempt.story if self.attempt is not None else None)
        self.console.end(verdict, time.time() - began, self.run_dir.run_id, advice)
        return verdict

    async def _attempts(self) -> Verdict:
        if self.context.attempt:
            self.run_dir.stop.unlink(missing_ok=True)  # it was for an attempt before
        self.inbox.tick()
        if refused := await self._load():
            return refused
        self._new_attempt()
        self.inbox.spawn(self._start_agents())
        while True:
            decision, choice = await self._live_through()
            if choice is None:
                return decision.verdict
            if not await self._prepare(decision, choice) or (refused := await self._load()):
                assert self.stop is not None or refused is not None
                return refused or Verdict(self.stop.code, self.stop.message)  # type: ignore[union-attr]
            self._new_attempt()
            self._current.advance(self._current.startup.begin)

    async def _start_agents(self) -> None:
        try:
            await self.transport.start(self.inbox)
        except MusterError as error:
            self.inbox.put(Refused(error))

    # One attempt after the other ------------------------------------------------------------------------------------

    @property
    def _current(self) -> Attempt:
        assert self.attempt is not None
        return self.attempt

    async def _load(self) -> Verdict | None:
        """Choose the checkpoint of the next attempt, beside the loop; return the verdict when there is none to use."""
        work = asyncio.ensure_future(asyncio.to_thread(resumption.with_checkpoint, self.context, self.console.say))
        work.add_done_callback(lambda _: self.inbox.put(Loaded()))
        await self._pump(work.done)
        try:
            self.context = await work
        except MusterError as error:
            self.log.attempt_ended(self.context.attempt, verdict := Verdict(error.exit_code, str(error)), time.time())
            return verdict
        if chosen := self.context.options.get("resume"):
            named = {"checkpoint": chosen["checkpoint"], "step": chosen["step"]}
            self.log.event("resuming", attempt=self.context.attempt, **named)
            self.console.say(f"going on from {chosen['checkpoint']}")
        return None

    def _new_attempt(self) -> None:
        nodes = [self.crew.nodes[slot] for slot in self.slots]
        for node in nodes:
            node.reached = node.progress = None
        patience_s = 0.0 if self.succession.past else self.transport.patience_s
        slots = self.slots
        send: Send = lambda rank, message: self.crew.send(slots[rank], message)  # noqa: E731
        self.attempt = Attempt(self.context, nodes, self.log, self.console, send, patience_s)
        if self.stop is not None:  # asked for while we were busy
            self.attempt.stop_all(self.stop, self.stop.message, 0.0)

    async def _live_through(self) -> tuple[Decision, Choice | None]:
        """Live an attempt to its end, write it down, and decide what comes next."""
        attempt = self._current
        await self._pump(attempt.is_over)
        over = time.time()
        self.crew.missing.clear()  # whoever has not come by now is not waited for again
        for rank in attempt.unswept():  # something there cannot be killed: no attempt may count on this node
            self.crew.lose(self.slots[rank], time.monotonic())
        verdict, final = self._judge(attempt)
        asked = final or self.stop is not None or attempt.told is not None
        decision, choice = self.succession.follow(attempt, self.slots, verdict, asked=asked)
        following = "the run is over"
        if choice is not None:
            following = f"attempt {attempt.number + 1} on {counted(len(choice.slots), 'node')}"
        row = attempt.story.row(attempt.roster.nodes, verdict, following, over)
        self.log.attempt_ended(attempt.number, verdict, attempt.began, over=over, **row)
        if choice is not None:
            self.succession.announce(attempt.number + 1, verdict, decision, choice, self.log, self.console)
        return decision, choice

    def _judge(self, attempt: Attempt) -> tuple[Verdict, bool]:
        """Judge an attempt, and say whether it must be the last one.

        A scheduler that ended it knows better why than who saw ranks and agents go.
        """
        verdict = attempt.verdict()
        asks = self.cause is not None and attempt.stop is attempt.told
        cause = self.cause(attempt.told_by or verdict.first) if asks and self.cause is not None else None
        return (judge(attempt.endings, cause), cause.final) if cause else (verdict, False)

    async def _prepare(self, decision: Decision, choice: Choice) -> bool:
        """Wait, start the agents that are to come back, and place the next attempt; False when a stop was asked for."""
        until = time.monotonic() + decision.delay_s
        await self._pump(lambda: time.monotonic() >= until or self.stop is not None)
        for slot in choice.revive:
            node = self.crew.nodes[slot]
            fence = node.lost_at + (FENCE_S if node.silent else ORPHANS_S) * self.context.remote
            await self._pump(lambda: time.monotonic() >= fence or self.stop is not None)  # noqa: B023
            if self.stop is None:
                await self._revive(slot)
        self.slots = choice.slots
        self.rank_of = {slot: rank for rank, slot in enumerate(choice.slots)}
        placement = self.succession.placement(self.context.placement, choice.slots)
        number = len(self.run_dir.attempt_numbers())
        self.context = replace(self.context, attempt=number, placement=placement, spares=())
        return self.stop is None

    async def _revive(self, slot: int) -> None:
        """Start the agent of a lost node until it answers: one that boots refuses at first."""
        node, deadline, why = self.crew.nodes[slot], time.monotonic() + self.job.start_timeout_s, ""
        while time.monotonic() < deadline and self.stop is None:
            node.forget_agent()
            try:
                await self.transport.restart(slot, self.inbox)
            except MusterError as error:
                node.failure = error
            await self._pump(lambda: node.settled or self.stop is not None or time.monotonic() > deadline)
            if node.hello is not None or (node.failure is not None and not isinstance(node.failure, UnreachableError)):
                return
            why = f"; the last time: {node.failure}" if node.failure is not None else why
            until = min(time.monotonic() + REVIVE_S, deadline)
            await self._pump(lambda: self.stop is not None or time.monotonic() >= until)  # noqa: B023
        waited = f"its agent did not answer within {self.job.start_timeout_s:g} s"
        node.failure = UnreachableError(f"{node.place.host}: {waited} (start_timeout_s){why}")

    # Messages -------------------------------------------------------------------------------------------------------

    async def _pump(self, until: Callable[[], bool]) -> None:
        """Handle what comes until something is so; the clock ticks, so it is asked often."""
        while not until():
            self._handle(await self.inbox.next())

    def _handle(self, event: Event) -> None:
        """Give an event to the method that is for it."""
        match event:
            case Heard():
                self._hear(event)
            case Gone():
                self._on_gone(event)
            case Failed():
                self._on_failed(event.slot, event.error)
            case Refused(error):
                self._current.stop_all(Stop(error.exit_code, str(error)), str(error), 0.0)
            case StopRequest():
                self._on_stop(event)
            case Tick():
                self._on_tick()
        while self.crew.broken:
            self._on_gone(Gone(self.crew.broken.pop()))

    def _hear(self, heard: Heard) -> None:
        """Handle a message of a node. Whatever is wrong with it costs that node, and not the run."""
        try:
            self._take(heard)
        except (StorageError, RunFolderError):  # our own folder fails
            raise
        except Exception as error:
            why = f"its agent broke the protocol: {type(heard.message).__name__}: {error or type(error).__name__}"
            self.log.event("warning", text=f"node {heard.slot}: {why}")
            self._on_gone(Gone(heard.slot, why, heard.via))

    def _take(self, heard: Heard) -> None:
        slot, message, attempt = heard.slot, heard.message, self.attempt
        if isinstance(message, Hello):
            if self.crew.greeted(slot, message, heard.via):
                self._answered(slot)
            return
        if not self.crew.heard(slot, heard.via):
            return  # of an agent that we have given up
        if isinstance(message, Heartbeat):
            self.crew.nodes[slot].beat(message, heard.received, self.context.attempt)
        elif attempt is not None and slot in self.rank_of and message.attempt == attempt.number:
            attempt.take(self.rank_of[slot], message)

    def _on_failed(self, slot: int, error: MusterError) -> None:
        node = self.crew.nodes[slot]
        if node.settled:  # once there is an agent, the end of its channel counts
            return
        if self._current.is_over() or not self._current.is_stopping:
            node.failure = error
            self.log.event("unreachable", attempt=self.context.attempt, node=slot, message=str(node.failure))
            self._answered(slot)

    def _answered(self, slot: int) -> None:
        """Go on with the start when the last node of the attempt has answered or failed."""
        attempt = self._current
        self.crew.answered(slot)
        if attempt.is_over():  # an agent that was lost is there again: the next attempt's
            return
        if attempt.is_stopping:
            self.crew.send(slot, StopRanks(attempt.number, 0.0))
        elif slot in self.rank_of and not attempt.startup.complete:
            attempt.advance(lambda: attempt.startup.answered(self.rank_of[slot]))

    def _on_gone(self, gone: Gone) -> None:
        node = self.crew.nodes[gone.slot]
        if gone.via not in (None, node.channel):
            return  # of an earlier agent of that node
        if not node.gone:
            self.crew.lose(gone.slot, time.monotonic())
            self._lost(gone.slot, gone.why)

    def _lost(self, slot: int, why: str, ago_s: float = 0.0) -> None:
        if self.attempt is not None and slot in self.rank_of:
            self.attempt.lose(self.rank_of[slot], why, exits.UNREACHABLE, ago_s)

    def _on_tick(self) -> None:
        now = time.monotonic()
        self.lease.renew()
        stood_s = self.crew.tick(now)
        if stood_s and self.context.remote:
            text = f"the supervisor itself stood still for {stood_s:.0f} s; nodes wait {LEASE_S:g} s for it"
            self.log.event("warning", text=text)
            self.console.say(f"muster: warning: {text}")
        for lost in self.crew.silent(now):
            self._lost(lost, f"its agent was silent for {SILENT_S:g} s", now - self.crew.nodes[lost].heard)
        request = requested(self.run_dir)
        if request.get("time") != self.request:
            self.request = request.get("time")
            self._on_stop(StopRequest.of(request))
        if self.attempt is not None:
            self.attempt.tick(now)

    def _on_stop(self, request: StopRequest) -> None:
        """End the run on request: save first where that is possible; at a second request at once."""
        limit = request.code == exits.TIMEOUT and resumption.saves(self.context)
        code = exits.REQUEUE if limit else request.code  # a scheduler's time limit: the next allocation continues
        again, self.stop = self.stop is not None, Stop(code, request.text or f"stopped by {request.by}")
        attempt = self.attempt
        if attempt is None or (not again and not request.now and attempt.drain(self.stop, request.by)):
            return
        grace_s = 0.0 if again or attempt.is_stopping or request.now else request.grace_s
        attempt.stop_all(self.stop, request.by, self.job.grace_s if grace_s is None else grace_s)

    # The end --------------------------------------------------------------------------------------------------------

    async def _farewell(self) -> None:
        """Let every agent go; then whatever still carries the run id is killed."""
        self.inbox.close(self.attempt.verdict().code & 0xFF if self.attempt is not None else 1)
        lost = [slot for slot, node in enumerate(self.crew.nodes) if node.gone or node.hello is None]
        await self.transport.close(lost)
        if left := processes.of_run(self.run_dir.run_id):
            self.log.event("warning", text=f"{len(left)} processes outlived their keeper and were killed")
            processes.kill_run(self.run_dir.run_id, term_s=0.0)
