"""The supervisor, one per run, outside the ranks: it starts agents and attempts, and leaves no process behind.

    agents answer → attempt ──ended──→ recovery.decide ──again──→ wait, choose nodes and checkpoint → attempt …
                    (attempt.py)             └── the end → dismiss every agent, record the verdict

All events arrive through one inbox, in order. Every wait has a deadline.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from muster.jobs.basics import exits
from muster.jobs.basics.errors import MusterError, RefusedError, RunFolderError, StorageError
from muster.jobs.basics.words import counted
from muster.jobs.hosts import nodelist
from muster.launch.common import processes
from muster.launch.common.limits import collecting_rarely, raise_open_files
from muster.launch.plan.plan import Context
from muster.launch.records.eventlog import EventLog
from muster.launch.records.lease import Lease
from muster.launch.records.progress_file import ProgressFile
from muster.launch.records.verdict import RankEnd, Stop, Verdict, judge
from muster.launch.supervision import resumption
from muster.launch.supervision.attempt import Attempt
from muster.launch.supervision.console import Console
from muster.launch.supervision.in_place import Regrouping
from muster.launch.supervision.inbox import (
    CheckpointChosen,
    Event,
    Failed,
    Heard,
    Inbox,
    NodeChannelClosed,
    Noticed,
    Refused,
    SchedulerJob,
    StopRequest,
    TaskFailed,
    Tick,
    requested,
)
from muster.launch.supervision.peer_memory import OF_MEMORY, Chosen, PeerMemory
from muster.launch.supervision.recovery import Decision, NodeChoice
from muster.launch.supervision.reloading import reload
from muster.launch.supervision.reserve import FENCE_S, Reserve
from muster.launch.supervision.run_nodes import SILENT_S, RunNodes
from muster.launch.supervision.space import wait_for_space
from muster.launch.supervision.story import last_advice
from muster.launch.supervision.straggler_watch import watch_stragglers
from muster.launch.supervision.succession import Succession
from muster.launch.transports.base import LEASE_S, Transport
from muster.launch.wire.messages import Heartbeat, Hello, Reached, Start, StopRanks, ToAgent


class Supervisor:
    """The supervisor of a run, from the first agent to the verdict."""

    def __init__(
        self, context: Context, transport: Transport, console: Console, own_job: SchedulerJob | None = None
    ) -> None:
        self.own_job = own_job  # the scheduler's job that was submitted for this run, if any
        self.transport = transport
        self.console = console
        self.context = context
        self.run_dir = context.run
        self.job = context.job
        self.log = EventLog(context.run, console.say)
        self.lease, self.progress_file, self.inbox = Lease(context.run), ProgressFile(context.run), Inbox()
        self.run_nodes = RunNodes(context.run_nodes, transport.printed)
        # the slots of the current attempt, by node rank
        self.slots: tuple[int, ...] = tuple(range(len(context.placement.nodes)))
        self.rank_of = {slot: slot for slot in self.slots}  # slot → node rank in the current attempt
        self.attempt: Attempt | None = None
        saves = context.entry is not None and resumption.saves(context)
        self.memory = PeerMemory(context, self.run_nodes, self.log)
        self.succession = Succession(context.job, self.run_nodes, self.memory, saves=saves)
        self.reloaded: Chosen | None = None  # the checkpoint in memory with which the next attempt begins in place
        self.reserve = Reserve(self.run_nodes, transport, self.inbox, remote=context.remote)
        self.stop: Stop | None = None  # the newest request to stop the run
        self.request: float | None = None  # the time of the newest `muster stop`

    async def run(self) -> Verdict:
        """Start attempts until the run ends, and record them. Leave no process of the run, even after an error."""
        began = time.time()
        raise_open_files()
        self.log.submitted(self.context, self.transport.name)
        self.inbox.listen_for_signals(self.run_dir)
        with collecting_rarely():
            try:
                verdict = await self._attempts()
            except (RunFolderError, StorageError) as error:  # the last row may still be writable
                verdict = Verdict(error.exit_code, str(error))
            finally:
                await self._farewell()
        if self.succession.begun and self.context.entry is None and self.job.checkpoint and not self.succession.saves:
            text = "checkpoint: had no effect, because the program opened no session (muster.session())"
            self.log.tell("warning", text=text)
        self.log.run_ended(self.context.attempt, verdict)
        self.lease.give_up()
        self.progress_file.remove()
        advice = last_advice(verdict, self.attempt.story if self.attempt is not None else None)
        self.console.end(verdict, time.time() - began, self.run_dir, advice)
        return verdict

    async def _attempts(self) -> Verdict:
        if self.context.attempt:
            self.run_dir.stop.unlink(missing_ok=True)  # the request was for an earlier start
        self.inbox.tick()
        if refused := await self._load():
            return refused
        self._new_attempt()
        self.inbox.spawn(self._start_agents())
        self.inbox.spawn(watch_stragglers(lambda: self.attempt, self.log))
        while True:
            decision, choice = await self._live_through()
            if choice is None:
                return decision.verdict
            regrouping = self._current.regrouping
            ready = self._regroup(regrouping) if regrouping else await self._prepare(decision, choice)
            if not ready or (not regrouping and (refused := await self._load())):
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
        """Choose the next attempt's checkpoint in a thread; return a verdict if none can be used."""
        work = asyncio.ensure_future(asyncio.to_thread(resumption.with_checkpoint, self.context, self.console.say))
        work.add_done_callback(lambda _: self.inbox.put(CheckpointChosen()))
        await self._pump(work.done)
        refused = None
        try:
            self.context = await work
        except MusterError as error:
            refused = Verdict(error.exit_code, str(error))
        on_disk = None if refused is not None else self.context.options.get("resume")
        chosen = on_disk
        if self.memory.is_on and self.attempt is not None:
            about = (on_disk["step"] if on_disk else 0, self.context.attempt, self.slots, self.job.start_timeout_s)
            chosen = await self.memory.load(self._wait, *about, forgets=True) or on_disk
        if chosen is None and refused is not None:
            self.log.attempt_ended(self.context.attempt, refused, time.time())
            return refused
        if chosen is not None:
            self.context = replace(self.context, options={**self.context.options, "saving": True, "resume": chosen})
            self._tell_resuming(chosen)
        return None

    def _tell_resuming(self, chosen: Chosen) -> None:
        named = {name: chosen[name] for name in ("checkpoint", "step", "memory") if name in chosen}
        self.log.tell("resuming", attempt=self.context.attempt, **named)

    async def _wait(self, until: Callable[[], bool]) -> bool:
        """Handle events until a condition is true, or the run is to be stopped."""
        await self._pump(lambda: until() or self.stop is not None)
        return True

    def _new_attempt(self) -> None:
        self.run_dir.trim_attempts(self.context.attempt)
        nodes = [self.run_nodes.nodes[slot] for slot in self.slots]
        for node in nodes:
            node.progress = None
            if not self.context.adopted:
                node.reached = None
        self.reserve.turn()
        patience_s = 0.0 if self.succession.past else self.transport.patience_s

        def send(rank: int, message: ToAgent) -> None:
            if isinstance(message, Start):
                self.memory.before_start(self.slots[rank], self._current.startup.context)
            self.run_nodes.send(self.slots[rank], message)

        ask = None if self.own_job is None else self._ask
        before = self.attempt
        stays: Callable[[RankEnd], Regrouping | str] = lambda ending: self.succession.stays(  # noqa: E731
            self._current, self.slots, ending
        )
        self.attempt = Attempt(self.context, nodes, self.log, self.console, send, patience_s, ask, stays)
        self.attempt.startup.is_first = before is None
        if before is not None and before.regrouping is not None:
            self.attempt.spread = before.spread.after(before.regrouping)
            if before.roster.nodes[0] is nodes[0]:
                self.attempt.startup.meet_again(before.startup)
        if self.stop is not None:  # the stop was requested between two attempts
            self.attempt.stop_all(self.stop, self.stop.message, 0.0)

    async def _live_through(self) -> tuple[Decision, NodeChoice | None]:
        """Run the current attempt to its end, record it, and decide what comes next."""
        attempt = self._current
        await self._pump(attempt.is_over)
        if self.stop is None:  # a node was lost in the first start: the others, and spares, may be about to answer
            await self._pump(
                lambda: not self.run_nodes.missing or time.monotonic() > attempt.deadline or bool(self.stop)
            )
        self.reloaded = await reload(attempt, self.memory, self._pump, lambda: self.stop is not None)
        over = time.time()
        for slot in [*self.run_nodes.missing]:  # give up the nodes that have not answered so far
            self.run_nodes.answered(slot)
        self.reserve.avoid([self.slots[rank] for rank in attempt.unswept()])
        verdict, final = self._judge(attempt)
        asked = final or self.stop is not None or attempt.told is not None
        decision, choice = self.succession.follow(attempt, self.slots, verdict, asked=asked)
        if attempt.regrouping is not None and choice is None:  # the run ends: stop the ranks that could continue
            attempt.stop_all(self.stop, verdict.message, self.job.grace_s)
            await self._pump(attempt.is_over)
        following = "the run is over"
        if choice is not None:
            on = f"{counted(attempt.regrouping.world_size, 'rank')}, in place" if attempt.regrouping else ""
            following = f"attempt {attempt.number + 1} on {on or counted(len(choice.slots), 'node')}"
        in_place = choice is not None and attempt.regrouping is not None and self.reloaded is None
        in_memory = self.memory.newest_step() if choice is not None else 0
        row = attempt.story.row(attempt.roster.nodes, verdict, following, over, in_place=in_place, in_memory=in_memory)
        self.log.attempt_ended(attempt.number, verdict, attempt.began, over=over, **row)
        if choice is not None:
            self.succession.announce(
                *(attempt.number + 1, verdict, decision, choice, self.log, self.console), attempt.regrouping
            )
        return decision, choice

    def _regroup(self, regrouping: Regrouping) -> bool:
        """Place the next attempt on the ranks that continue; return False on a stop request."""
        for slot in self.slots:  # a node may have a rank whose copy of a split model has lost another rank
            if slot not in regrouping.slots and self.run_nodes.nodes[slot].is_alive:
                self.run_nodes.send(slot, StopRanks(self._current.number, 0.0))
        joining = not self._current.joiners.ready.isdisjoint(regrouping.adopted.values())
        done = self._current.story.last_step(self._current.roster.nodes)
        kept = {**self._current.story.newest, "joining": joining, "done": done}
        self._turn(regrouping.slots, {"in_place": kept, "resume": self.reloaded}, regrouping)
        if self.reloaded is not None:
            self._tell_resuming(self.reloaded)
        return self.stop is None

    def _turn(self, slots: tuple[int, ...], options: dict[str, Any], regrouping: Regrouping | None = None) -> None:
        self.slots = slots
        self.rank_of = {slot: rank for rank, slot in enumerate(slots)}
        self.context = replace(
            self.context,
            job=self.job if regrouping is None else self.succession.fitted(regrouping.world_size),
            attempt=self.context.attempt + 1,
            placement=self.succession.placement(self.context.placement, slots, regrouping),
            spares=(),
            adopted=regrouping.adopted if regrouping is not None else {},
            rejoin_s=max(self.context.rejoin_s, self._current.story.start_s),  # a restart would take as long
            options={**self.context.options, **options},
        )

    def _judge(self, attempt: Attempt) -> tuple[Verdict, bool]:
        """Return the verdict on an attempt, and whether it must be the last one.

        If a scheduler ended the attempt, use its reason: the exits of ranks and agents are only consequences.
        """
        verdict = attempt.verdict()
        if self.own_job is None or attempt.stop is not attempt.told:
            return verdict, False
        cause = self.own_job.cause(attempt.told_by or verdict.first)
        return (judge(attempt.endings, cause), cause.final) if cause else (verdict, False)

    def _ask(self, limit: bool) -> None:
        """Ask the scheduler in a thread whether it is about to end the job; the attempt gets the answer."""
        assert self.own_job is not None
        answer = asyncio.ensure_future(asyncio.to_thread(self.own_job.notice, limit=limit))
        answer.add_done_callback(lambda _: self.inbox.put(Noticed(answer)))

    async def _prepare(self, decision: Decision, choice: NodeChoice) -> bool:
        """Wait for the delay, restart agents if needed, and place the next attempt; return False on a stop request."""
        await wait_for_space(self.run_dir, self.log, self._pump, lambda: self.stop is not None, decision.delay_s)
        choice = self.succession.choose(self.slots) or choice  # meanwhile nodes may have been lost or have returned
        if choice.revive:
            await self._revive()
            choice = self.succession.choose(self.slots) or choice
        self._turn(choice.slots, {"in_place": None})
        return self.stop is None

    async def _revive(self) -> None:
        """Wait until enough nodes are back. After the time limit, give up the nodes that are still lost."""
        limit_s = self.job.start_timeout_s
        deadline = time.monotonic() + limit_s + FENCE_S * self.context.remote
        self.reserve.needed = True

        def settled() -> bool:
            choice = self.succession.choose(self.slots)
            return choice is None or not choice.revive

        await self._pump(lambda: self.stop is not None or time.monotonic() > deadline or settled())
        self.reserve.needed = False
        choice = self.succession.choose(self.slots)
        if choice is None or choice.revive:
            self.reserve.give_up(f"its agent did not answer within {limit_s:g} s (start_timeout_s)")

    # Messages -------------------------------------------------------------------------------------------------------

    async def _pump(self, until: Callable[[], bool]) -> None:
        """Handle events until a condition is true. It is checked after every event, at least every TICK_S."""
        while not until():
            self._handle(await self.inbox.next())

    def _handle(self, event: Event) -> None:
        """Pass an event to its handler."""
        match event:
            case Heard():
                self._hear(event)
            case NodeChannelClosed():
                self._on_gone(event)
            case Failed():
                self._on_failed(event.slot, event.error)
            case Refused(error):
                self._current.stop_all(Stop(error.exit_code, str(error)), str(error), 0.0)
            case StopRequest():
                self._on_stop(event)
            case Noticed(answer):
                self._current.noticed(answer.result())
            case Tick():
                self._on_tick()
            case TaskFailed(error):
                self.log.event("warning", text=f"the supervisor failed: {type(error).__name__}: {error}")
                raise error
        while self.run_nodes.broken:
            self._on_gone(NodeChannelClosed(self.run_nodes.broken.pop()))

    def _hear(self, heard: Heard) -> None:
        """Handle a node's message. An invalid message, or an unfit node, costs only that node, not the run."""
        try:
            self._take(heard)
        except (StorageError, RunFolderError):  # the run folder failed, not the node
            raise
        except Exception as error:
            why = f"its agent broke the protocol: {type(heard.message).__name__}: {error or type(error).__name__}"
            if isinstance(error, RefusedError):  # the node cannot take part in this attempt
                why = str(error)
            self.log.event("warning", text=f"node {heard.slot}: {why}")
            self._on_gone(NodeChannelClosed(heard.slot, why, heard.via))

    def _take(self, heard: Heard) -> None:
        slot, message, attempt = heard.slot, heard.message, self.attempt
        if isinstance(message, Hello):
            if self.run_nodes.greeted(slot, message, heard.via):
                self.reserve.starting.discard(slot)
                self._answered(slot)
            return
        if not self.run_nodes.heard(slot, heard.via):
            return  # the message is from an agent that was given up
        if isinstance(message, Heartbeat):
            self.run_nodes.nodes[slot].beat(message, heard.received, self.context.attempt)
            is_current = attempt is not None and attempt.number == self.context.attempt  # not between two attempts
            if attempt is not None and is_current and slot in self.rank_of and self.context.remote:
                attempt.startup.watch_clock(self.rank_of[slot])
        elif isinstance(message, OF_MEMORY):
            step = self.memory.take(slot, message, self.context.attempt, self.slots)
            if step is not None and attempt is not None:
                attempt.story.copied_step = step
        elif attempt is None or message.attempt != attempt.number:
            return
        elif isinstance(message, Reached) and (slot in self.reserve.asked or slot not in self.rank_of):
            self.reserve.reached(slot, message, attempt, self.slots, time.monotonic())
        elif slot in self.rank_of:
            attempt.take(self.rank_of[slot], message)

    def _on_failed(self, slot: int, error: MusterError) -> None:
        node = self.run_nodes.nodes[slot]
        if node.settled or self.reserve.failed(slot, error, time.monotonic()):
            return  # once there is an agent, only the end of its channel counts
        if self._current.is_over() or not self._current.is_stopping:
            node.failure = error
            self.log.event("unreachable", attempt=self.context.attempt, node=slot, message=str(node.failure))
            self._answered(slot)

    def _answered(self, slot: int) -> None:
        """Continue the start when the last node of the attempt has answered or failed."""
        attempt = self._current
        self.run_nodes.answered(slot)
        if attempt.is_over():  # a lost node's agent has returned, for use in the next attempt
            return
        if attempt.is_stopping:
            self.run_nodes.send(slot, StopRanks(attempt.number, 0.0))
        elif slot in self.rank_of and not attempt.startup.complete:
            attempt.advance(lambda: attempt.startup.answered(self.rank_of[slot]))

    def _on_gone(self, gone: NodeChannelClosed) -> None:
        node = self.run_nodes.nodes[gone.slot]
        if gone.via not in (None, node.channel):
            return  # that channel belongs to an earlier agent of the node
        if not node.gone:
            self.run_nodes.lose(gone.slot, time.monotonic())
            self._lost(gone.slot, gone.why)

    def _lost(self, slot: int, why: str, ago_s: float = 0.0) -> None:
        self.memory.lose(slot)
        if self.attempt is not None and slot in self.rank_of:
            self.attempt.lose(self.rank_of[slot], why, exits.UNREACHABLE, ago_s)

    def _on_tick(self) -> None:
        now = time.monotonic()
        self.lease.renew()
        late_s = self.run_nodes.tick(now)
        if late_s > SILENT_S / 2 and self.context.remote:
            text = f"the supervisor itself did not run for {late_s:.0f} s; after {LEASE_S:g} s, agents stop their ranks"
            self.log.tell("warning", text=text)
        for lost in self.run_nodes.silent(now):
            silent_s = now - self.run_nodes.nodes[lost].heard
            self._lost(lost, f"its agent was silent for {silent_s:.0f} s", silent_s)
        request = requested(self.run_dir)
        if request.get("time") != self.request:
            self.request = request.get("time")
            self._on_stop(StopRequest.of(request))
        if self.attempt is not None:
            self.progress_file.write(self.context.attempt, [self.run_nodes.nodes[slot] for slot in self.slots])
            self.attempt.tick(now, late_s)
            if self.job.restart is not None:
                self._tend_reserve(self.attempt, now)

    def _tend_reserve(self, attempt: Attempt, now: float) -> None:
        """Restart lost nodes' agents. Once the job can use more nodes than it has, save and continue on more."""
        used = () if attempt.is_over() else self.succession.used(attempt, self.slots)
        self.reserve.tick(now, attempt, used)
        missing = self.job.nodes - len(used)
        fit = [slot for slot in self.reserve.ready(now, missing) if slot not in used] if missing else []
        if not used or self._tend_joiners(attempt, fit) or not fit:
            return
        choice = self.succession.choose(used, [*used, *fit])
        if choice is not None and len(choice.slots) > len(used):
            names = nodelist.fold(self.run_nodes.hosts(sorted(set(choice.slots) - set(used))))
            text = f"to continue on {counted(len(choice.slots), 'node')}, including {names} again"
            attempt.drain(Stop(exits.REQUEUE, f"stopped {text}"), text, growing=True)

    def _tend_joiners(self, attempt: Attempt, fit: Sequence[int]) -> bool:
        """Start the ranks that an attempt lacks, if they can join it while it trains; return whether they can."""
        if not self.succession.can_be_joined(attempt):
            return False
        found = self.succession.missing(attempt, self.slots, fit) if attempt.joiners.may_start else []
        if not found:
            return True
        for slot in dict.fromkeys(found):
            if slot not in self.slots:
                self.rank_of[slot] = len(self.slots)
                self.slots = (*self.slots, slot)
                attempt.roster.add_node(self.run_nodes.nodes[slot])
        numbers = dict(enumerate(found, attempt.roster.next_rank))
        try:
            starts = attempt.startup.joiners({rank: self.rank_of[slot] for rank, slot in numbers.items()})
        except MusterError as error:
            self.log.event("not_joined", attempt=attempt.number, rank=min(numbers), why=str(error))
            return False
        attempt.joiners.start(starts, partial(self.succession.regrouped, attempt, self.slots), self.job.start_timeout_s)
        return True

    def _on_stop(self, request: StopRequest) -> None:
        """Stop the run on request. On the first request, save first if possible; on a second one, stop at once."""
        limit = request.code == exits.TIMEOUT
        # At a scheduler's time limit, a run that can resume continues in the next allocation.
        attempt, again = self.attempt, self.stop is not None
        session = attempt is not None and attempt.story.has_session
        continues = limit and resumption.continues(self.context, session=session)
        code = exits.REQUEUE if continues else request.code
        self.stop = stop = Stop(code, request.text or f"stopped by {request.by}", why=request.why)
        self.log.event("asked", attempt=self.context.attempt, reason=stop.message)
        if attempt is None or (not again and not request.now and attempt.drain(stop, request.by)):
            return
        given_s = 0.0 if again or attempt.is_stopping or request.now else request.grace_s
        grace_s = self.job.grace_s if given_s is None else given_s
        if limit and not again:
            attempt.ask_first(lambda: attempt.stop_all(stop, request.by, grace_s), limit=True)
        else:
            attempt.stop_all(stop, request.by, grace_s)

    # The end --------------------------------------------------------------------------------------------------------

    async def _farewell(self) -> None:
        """Dismiss every agent, then kill all processes that still have the run id in their environment."""
        self.inbox.close(self.attempt.verdict().code & 0xFF if self.attempt is not None else 1)
        lost = [slot for slot, node in enumerate(self.run_nodes.nodes) if node.gone or node.hello is None]
        await self.transport.close(lost)
        if left := processes.of_run(self.run_dir.run_id):
            self.log.event("warning", text=f"{len(left)} processes outlived their rank parent and were killed")
            processes.kill_run(self.run_dir.run_id, term_s=0.0)
