"""The supervisor: starts the agents, watches the ranks, judges, and leaves nothing behind. One attempt at a time.

    agents answer → startup.py → every node starts its ranks → they arrive, meet, work, end
         │                                    │
         └── a failure, the user, a deadline or a lost node ──→ stop all: TERM, grace, KILL, sweep → verdict

Everything that happens comes through one inbox, in order; every wait has a deadline.
"""

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Final

from jobs import exits
from jobs.errors import MusterError
from launch import processes, storage
from launch.channel import ChannelClosed, Message
from launch.console import Console
from launch.eventlog import EventLog
from launch.inbox import NOBODY, Inbox
from launch.lease import Lease
from launch.plan import Context
from launch.roster import Roster
from launch.startup import Startup
from launch.transports.base import Transport
from launch.verdict import Ending, Stop, Verdict, ending_of, judge

SWEEP_S: Final = 3.0  # beyond the grace, for the last KILL to be reported
MEET_S: Final = 5.0  # beyond the start time-out, for the ranks' own time-out to speak first
SILENT_S: Final = 5.0
BEAT_S: Final = 1.0

Cause = Callable[[Ending | None], Stop | None]


class Supervisor:
    """One attempt of a run, from its first agent to its verdict."""

    def __init__(self, context: Context, transport: Transport, console: Console, cause: Cause | None = None) -> None:
        self.cause = cause  # what the world outside says of the end of a run, after a first failure
        self.transport = transport
        self.console = console
        self.run_dir = context.run
        self.job = context.job
        self.attempt = context.attempt
        self.context_is_remote = context.remote
        self.ours = context.entry is not None
        self.log = EventLog(context.run)
        self.lease = Lease(context.run)
        self.inbox = Inbox()
        self.roster = Roster(context.placement, meets=self.ours)
        self.nodes = self.roster.nodes
        self.startup = Startup(context, self.roster, self.log, console, self._send)
        self.endings: list[Ending] = []
        self.stop: Stop | None = None
        self.told: Stop | None = None  # the stop for which a node's SIGTERM was the reason
        self.told_by: Ending | None = None
        self.stop_deadline: float | None = None
        self.started_at = time.monotonic()
        self.deadline = self.started_at + max(context.job.start_timeout_s, transport.patience_s)
        self.ticked = time.monotonic()
        self.beaten = 0.0

    async def run(self) -> Verdict:
        """Run the attempt and record it; whatever happens, no process of the run is left."""
        began = time.time()
        self.log.submitted(self.startup.context, self.transport.name)
        self.inbox.listen_for_signals()
        try:
            await self._attempt()
        finally:
            await self._farewell()
        verdict = self._judge()
        advice = self.log.ended(self.attempt, verdict, began)
        self.lease.give_up()
        self.console.end(verdict, time.time() - began, self.run_dir.run_id, advice)
        return verdict

    def _judge(self) -> Verdict:
        """Judge the attempt; a scheduler that ended it knows better why than who saw ranks and agents go."""
        verdict = judge(self.endings, self.stop)
        if self.cause is not None and self.stop is self.told and (cause := self.cause(self.told_by or verdict.first)):
            return judge(self.endings, cause)
        return verdict

    async def _attempt(self) -> None:
        self.inbox.tick()
        self.inbox.spawn(self._start_agents())
        while not self._finished():
            self._handle(*await self.inbox.next())

    async def _start_agents(self) -> None:
        try:
            await self.transport.start(self.inbox)
        except MusterError as error:
            self.inbox.put(NOBODY, {"did": "refused", "error": error})

    def _finished(self) -> bool:
        if self.stop_deadline is None:
            return not self.roster.running
        if time.monotonic() > self.stop_deadline:
            return True
        return all(node.swept or node.gone or node.channel is None for node in self.nodes)

    # Messages -------------------------------------------------------------------------------------------------------

    def _handle(self, node_rank: int, message: Message) -> None:
        """Give a message to the method that is called after it."""
        if node_rank >= 0:
            self.nodes[node_rank].heard = time.monotonic()
        if handler := getattr(self, f"_on_{message['did']}", None):
            handler(node_rank, message)

    def _on_hello(self, node_rank: int, message: Message) -> None:
        node = self.nodes[node_rank]
        if node.hello or node.failure is not None:
            message["channel"].close()  # a second agent for one node, or one that we have given up
            return
        node.hello, node.channel = message, message["channel"]
        if self.stop_deadline is not None:
            self._send(node_rank, {"do": "stop", "grace_s": 0.0})
            return
        self._advance(self.startup.answered)

    def _on_failed(self, node_rank: int, message: Message) -> None:
        node = self.nodes[node_rank]
        if node.hello:  # what started its agent has ended: the channel's own end tells it
            return
        if node.failure is None and self.stop_deadline is None:
            node.failure = message["error"]
            self.log.event("unreachable", attempt=self.attempt, node=node_rank, message=str(node.failure))
            self._advance(self.startup.answered)

    def _on_refused(self, node_rank: int, message: Message) -> None:
        error = message["error"]
        self._stop_all(Stop(error.exit_code, str(error)), str(error), 0.0)

    def _on_prepared(self, node_rank: int, message: Message) -> None:
        self._begin_again()
        self._advance(lambda: self.startup.prepared(message))

    def _on_reached(self, node_rank: int, message: Message) -> None:
        self._begin_again()
        self._advance(lambda: self.startup.reached(node_rank, message))

    def _begin_again(self) -> None:
        """Count the start time-out anew: it is for each step of the start."""
        self.started_at = time.monotonic()
        self.deadline = self.started_at + self.job.start_timeout_s

    def _advance(self, step: Callable[[], Stop | None]) -> None:
        """Take a step of the start, unless we are stopping; it may be the last one, or what stops the run."""
        if self.stop_deadline is not None:
            return
        if stop := step():
            self._stop_all(stop, stop.message.partition("\n")[0], 0.0)

    def _on_started(self, node_rank: int, message: Message) -> None:
        host = self.nodes[node_rank].hello["host"]
        self.log.event("started", attempt=self.attempt, node=node_rank, host=host, ranks=message["ranks"])

    def _on_report(self, node_rank: int, message: Message) -> None:
        report, rank = message["report"], message["rank"]
        if report["report"] == "arrived":
            self.roster.arrived.add(rank)
        elif report["report"] == "joined":
            self.roster.joined.add(rank)
            if len(self.roster.joined) == len(self.roster.node_of):
                seconds = round(time.monotonic() - self.started_at, 3)
                self.log.event("joined", attempt=self.attempt, seconds=seconds)
                ranks = len(self.roster.joined)
                self.console.say(f"{ranks} rank{'s' * (ranks != 1)} joined after {seconds:.1f} s")
        elif report["report"] == "progress":
            self.console.progress(report)

    def _on_exited(self, node_rank: int, message: Message) -> None:
        node = self.nodes[node_rank]
        ending = ending_of(message, node_rank, node.hello["host"], ahead_s=node.clock.seconds, ours=self.ours)
        self.roster.running.discard(message["rank"])
        self._record(ending)

    def _record(self, ending: Ending) -> None:
        self.endings.append(ending)
        self.log.event("exited", attempt=self.attempt, **asdict(ending))
        if ending.cause in ("own", "peer"):
            self._stop_all(None, f"{ending.where()} has failed", self.job.grace_s)

    def _on_swept(self, node_rank: int, message: Message) -> None:
        self.nodes[node_rank].swept = True

    def _on_log(self, node_rank: int, message: Message) -> None:
        self.console.lines(message["stream"], message["lines"])

    def _on_file(self, node_rank: int, message: Message) -> None:
        storage.keep(self.run_dir, message)

    def _on_broken(self, node_rank: int, message: Message) -> None:
        self.nodes[node_rank].swept |= message.get("gone", False)
        self._lose(node_rank, message["broken"], message.get("code", exits.REFUSED))

    def _on_gone(self, node_rank: int, message: Message) -> None:
        if not self.nodes[node_rank].gone:
            self.nodes[node_rank].gone = True
            self._lose(node_rank, message["why"], exits.UNREACHABLE)

    def _lose(self, node_rank: int, why: str, code: int) -> None:
        """Count a node's remaining ranks as ended with it."""
        lost = {rank for rank in self.roster.running if self.roster.node_of[rank] == node_rank}
        if not lost:
            return
        self.roster.running -= lost
        host = self.roster.hosts[node_rank]
        cause = "own" if self.stop_deadline is None else "stopped"
        self._record(Ending(None, node_rank, host, code, None, time.time(), cause, why))  # type: ignore[arg-type]

    def _on_told(self, node_rank: int, message: Message) -> None:
        """Take a node's SIGTERM for the end of the run: a scheduler sends it to agents and ranks, in any order."""
        where = f"node {node_rank} ({self.roster.hosts[node_rank]})"
        stop = Stop(exits.STOPPED, f"SIGTERM at {where}: its scheduler, or somebody there, ends the job")
        if self.stop_deadline is None:
            self._stop_all(stop, stop.message, self.job.grace_s)
        elif self.stop is None and all(each.signal == "SIGTERM" for each in self.endings if each.cause == "own"):
            self.stop = stop
        if self.stop is stop:
            host = self.roster.hosts[node_rank]
            self.told, self.told_by = stop, Ending(None, node_rank, host, None, "SIGTERM", time.time(), "own")

    def _on_stop(self, node_rank: int, message: Message) -> None:
        grace_s = 0.0 if self.stop_deadline is not None or message.get("now") else message.get("grace_s")
        grace_s = self.job.grace_s if grace_s is None else grace_s
        code, text = message.get("code", exits.STOPPED), message.get("text", f"stopped by {message['by']}")
        self._stop_all(Stop(code, text), message["by"], grace_s)

    # Deadlines and stopping -----------------------------------------------------------------------------------------

    def _on_heartbeat(self, node_rank: int, message: Message) -> None:
        self.nodes[node_rank].clock.note(
            sent=message["sent"], heard=message["heard"], answered=message["time"], received=message["received"]
        )

    def _beat(self, node_rank: int) -> None:
        self._send(node_rank, {"do": "beat", "sent": time.time()})

    def _on_tick(self, node_rank: int, message: Message) -> None:
        now = time.monotonic()
        self.lease.renew()
        if self.startup.complete and now - self.beaten >= BEAT_S:
            self.beaten = now
            for rank, node in enumerate(self.nodes):
                if node.channel is not None and not node.gone:
                    self._beat(rank)
        if self.stop_deadline is None and self.run_dir.stop.exists():
            request = json.loads(self.run_dir.stop.read_text())
            self._on_stop(NOBODY, {**request, "by": request.get("who", "muster stop")})
        if self.stop_deadline is not None:
            return
        frozen = now - self.ticked > SILENT_S / 2  # we ourselves were (Ctrl-Z, a sleeping laptop): nobody else is late
        if frozen and self.context_is_remote:
            self.startup.warn(f"the supervisor itself stood still for {now - self.ticked:.0f} s; nodes wait 8 s for it")
        self.ticked = now
        for rank, node in enumerate(self.nodes):
            if frozen:
                node.heard = now
            if self.startup.complete and node.hello and not node.gone and now - node.heard > SILENT_S:
                node.gone = True
                self._lose(rank, f"its agent was silent for {SILENT_S:g} s", exits.UNREACHABLE)
        late_s = now - self.deadline
        if late_s > 0 and (late := self.roster.late(self.job.start_timeout_s, patient=late_s < MEET_S)):
            self._stop_all(Stop(exits.TIMEOUT, late), late, self.job.grace_s)

    def _stop_all(self, stop: Stop | None, reason: str, grace_s: float) -> None:
        """Tell every node to stop its ranks; a second call only shortens the grace."""
        if self.stop_deadline is None:
            self.stop = stop
            self.log.event("stopping", attempt=self.attempt, reason=reason)
            if self.startup.begun and (stop is not None or self.roster.running):
                self.console.say(f"stopping the ranks: {reason}")
        elif grace_s > 0:
            return
        self.stop_deadline = time.monotonic() + grace_s + SWEEP_S
        for rank, node in enumerate(self.nodes):
            if node.channel is not None and not node.gone:
                self._send(rank, {"do": "stop", "grace_s": grace_s})

    # Plumbing -------------------------------------------------------------------------------------------------------

    def _send(self, node_rank: int, message: Message) -> None:
        """Send without waiting: a node that takes nothing more must not keep the others from hearing us."""
        channel = self.nodes[node_rank].channel
        assert channel is not None
        try:
            channel.post(message)
        except ChannelClosed:
            self.inbox.put(node_rank, {"did": "gone", "why": "its agent has gone"})

    async def _farewell(self) -> None:
        """Let every agent go; then whatever still carries the run id is killed."""
        self.inbox.close()
        bye = {"do": "bye", "code": judge(self.endings, self.stop).code}
        for channel in self.inbox.channels:
            try:
                channel.post(bye)
            except ChannelClosed:
                continue  # gone already: that is what bye asks for
            finally:
                channel.close()
        lost = [number for number, node in enumerate(self.nodes) if node.gone or not node.hello]
        await self.transport.close(lost)
        if left := processes.of_run(self.run_dir.run_id):
            self.log.event("warning", text=f"{len(left)} processes outlived their keeper and were killed")
            processes.kill_run(self.run_dir.run_id, term_s=0.0)
