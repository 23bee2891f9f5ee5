"""One attempt: one start of all ranks, from the `prepare` message until the last node has swept.

    startup.py → every node starts its ranks → they arrive, join, work, end
         │                        │
         │                        ├── a drain: hold, agree on a step, save, end with 75
         └── a failure, the user, a deadline, a hang or a lost node ──→ stop all: TERM, grace, KILL, sweep

`supervisor.py`, which outlives the attempt, passes on the messages of the nodes. Each attempt has its own numbers for
the nodes.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from signal import SIGTERM
from typing import Final

from muster.jobs.basics import exits
from muster.jobs.basics.words import counted
from muster.launch.common import storage
from muster.launch.plan.plan import Context
from muster.launch.records.eventlog import EventLog
from muster.launch.records.verdict import Cause, RankEnd, Stop, Verdict, ending_of, judge
from muster.launch.supervision import resumption
from muster.launch.supervision.console import Console
from muster.launch.supervision.hangs import HangWatch, Mute
from muster.launch.supervision.in_place import Regrouping, Spread
from muster.launch.supervision.joiners import Joiners
from muster.launch.supervision.progress import OUTPUT
from muster.launch.supervision.roster import Roster
from muster.launch.supervision.run_nodes import NodeState
from muster.launch.supervision.startup import Startup
from muster.launch.supervision.story import SAVED, Story
from muster.launch.wire import messages as wire
from muster.launch.wire.codec import ProtocolError
from muster.launch.wire.records import RankReport
from muster.slurm.notice import PREEMPTED, Notice

SWEEP_S: Final = 3.0  # time after the grace period for nodes to report the last SIGKILL
MEET_S: Final = 5.0  # added to the start time-out, so that the ranks report their own time-out first
DRAIN_S: Final = 60.0
LOOK_S: Final = 1.0  # between two looks for a hang
LEAVING_S: Final = 5.0  # time before a scheduler's deadline that is reserved for sweeping and for requeuing the job
LONGEST_WHY: Final = 1 << 12  # characters
ALL_WAIT_S: Final = 3.0  # if all ranks wait for so long although none was lost, all restart
KILL_WAIT_S: Final = 25.0  # a scheduler that sends SIGTERM sends SIGKILL 30 s later (Slurm's KillWait)

Send = Callable[[int, wire.ToAgent], None]


class Attempt:
    """The state of one attempt: its ranks, the requests to stop it, and how each rank ended."""

    def __init__(
        self,
        context: Context,
        nodes: Sequence[NodeState],
        log: EventLog,
        console: Console,
        send: Send,
        patience_s: float,
        ask: Callable[[bool], None] | None = None,
        stays: Callable[[RankEnd], Regrouping | str] | None = None,
    ) -> None:
        self.context = context
        self.job = context.job
        self.number = context.attempt
        self.log = log
        self.console = console
        self.send = send
        self.ours = context.entry is not None
        self.roster = Roster(context.placement, nodes, meets=self.ours)
        self.startup = Startup(context, self.roster, log, console, send)
        self.story = Story(context, log, console)
        self.endings: list[RankEnd] = []
        self.stop: Stop | None = None
        self.told: Stop | None = None  # the stop that was caused by a node's SIGTERM or by the scheduler's notice
        self.told_by: RankEnd | None = None
        self.ask = ask  # asks the scheduler whether it is about to end the job; `noticed` gets the answer
        self.unless_noticed: list[Callable[[], None]] = []  # end the attempt, unless the scheduler does
        self.stays = stays  # returns how the other ranks continue after a failure, or why they cannot
        self.regrouping: Regrouping | None = None  # the ranks continue in the next attempt
        self.spread = Spread()  # which ranks have the state
        self.joiners = Joiners(self.number, self.roster, log, send, self._join)
        self.joining = False  # the drain is followed by an attempt with the joiners
        self.all_wait_at: float | None = None  # when the last rank began to wait (monotonic)
        self.waiting: set[int] = set()  # ranks that wait for the next attempt
        self.draining: Stop | None = None
        self.growing = False  # the drain is followed by a restart on more nodes
        self.drain_deadline = 0.0
        self.stop_at: int | None = None
        self._looked = 0.0  # when it last looked for a hang
        self.hangs = HangWatch(self.roster, context.job.hang_s, context.job.start_timeout_s)
        self.stuck: set[int] = set()  # node ranks of nodes where a process survives SIGKILL
        self.stop_deadline: float | None = None
        self.overdue = False  # the ranks have not ended by `stop_deadline`
        self.began = self.story.began
        self.started_at = time.monotonic()
        self.limit_s = min(context.job.start_timeout_s, context.rejoin_s if context.adopted else math.inf)
        self.deadline = self.started_at + max(self.limit_s, patience_s)

    @property
    def is_stopping(self) -> bool:
        """True once the ranks have been told to stop."""
        return self.stop_deadline is not None

    def is_over(self) -> bool:
        """Return whether the attempt is over: its ranks have ended and been swept, or could not be stopped in time."""
        if self.unless_noticed:
            return False
        if self.stop_deadline is None:
            return self.regrouping is not None or not self.roster.running
        return self.overdue or not self.roster.waits_for_sweep()

    def unswept(self) -> list[int]:
        """List the node ranks of nodes whose agent is alive but could not end its ranks."""
        clean = self.roster.swept - self.stuck
        nodes = enumerate(self.roster.nodes)
        return [rank for rank, node in nodes if self.is_stopping and node.is_alive and rank not in clean]

    def verdict(self) -> Verdict:
        """Return the verdict on the ranks that have ended so far."""
        verdict = judge(self.endings, self.stop)
        if self.draining is None or self.stop is not self.draining or self.joining:
            return verdict
        step, saved = self.story.saved_step, self.stop_at is not None and self.story.saved_step == self.stop_at
        last = f"{SAVED} {step}" if saved else "no new checkpoint was saved"
        return replace(verdict, message=f"{verdict.message}; {last}")

    # Messages -------------------------------------------------------------------------------------------------------

    def take(self, node_rank: int, message: wire.FromAgent) -> None:
        """Handle a node's message about this attempt.

        Raises:
            ProtocolError: if the node may not send this message, or not at this point.
        """
        self.startup.check_begun(message)
        match message:
            case wire.Prepared() | wire.Reached():
                self._restart_deadline()
                self.advance(lambda: self.startup.step(node_rank, message))
            case wire.Started():
                self.roster.check_own(node_rank, *(rank for rank, _, _ in message.ranks))
                self._on_started(node_rank, message)
            case wire.Report():
                self.roster.check_own(node_rank, *message.ranks)
                for rank in message.ranks:
                    self._on_report(rank, message.report)
            case wire.Exited():
                self.roster.check_own(node_rank, message.rank)
                self._on_exited(node_rank, message)
            case wire.Exits():
                with self.log.together():
                    for each in message.ranks:
                        self.take(node_rank, each)
            case wire.Log():
                self.roster.check_own(node_rank, message.rank)
                self.console.lines(message.stream, message.lines, message.rank)
            case wire.Stacks():
                self.roster.check_own(node_rank, *(stack["rank"] for stack in message.ranks))
                self.hangs.take(message)
                self._end_hang(time.monotonic())
            case wire.Held():
                self._on_held(message)
            case wire.Swept():
                self._on_swept(node_rank, message)
            case wire.File():
                run, ranks = self.context.run, self.context.placement.nodes[node_rank].rank_range
                allowed = storage.files_of(run, run.attempt(self.number), node_rank, ranks)
                storage.keep(run, allowed, (message.name, message.offset, message.data))
            case wire.Terminated():
                self._on_terminated(node_rank)
            case wire.Broken():
                if message.gone:
                    self.roster.swept.add(node_rank)
                self.lose(node_rank, message.why, message.code)

    def _restart_deadline(self) -> None:
        """Set the deadline anew, because the start time-out applies to each step of the start separately."""
        self.started_at = time.monotonic()
        self.deadline = self.started_at + self.limit_s

    # The start ------------------------------------------------------------------------------------------------------

    def advance(self, step: Callable[[], Stop | None]) -> None:
        """Run a step of the start unless the attempt is stopping; if the step returns a stop, stop the attempt."""
        if not self.is_stopping and (stop := step()):
            self.stop_all(stop, stop.message.partition("\n")[0], 0.0)

    def _on_started(self, node_rank: int, message: wire.Started) -> None:
        """Log the pids and start ticks of a node's ranks. `muster stop` ends only processes that match both."""
        host, (pids, ticks) = self.roster.hosts[node_rank], ([(r[0], r[at]) for r in message.ranks] for at in (1, 2))
        self.log.event("started", attempt=self.number, node=node_rank, host=host, ranks=pids, ticks=ticks)

    def _on_report(self, rank: int, report: RankReport) -> None:
        """Handle a rank's report."""
        if rank in self.joiners.numbers:
            self.joiners.report(rank, report)
            return
        if report["report"] == "arrived":
            self.roster.arrived.add(rank)
            return
        if not self.ours:
            self.story.session_opened()
        if report["report"] == "replicas" and self.ours:
            self.spread = Spread.of(report)
            return
        if report["report"] == "waiting" and report["of"] == self.number:
            self._on_waiting(rank)
        if report["report"] == "joined":
            self.roster.arrived.add(rank)
            self.roster.joined.add(rank)
            if len(self.roster.joined) == len(self.roster.node_of):
                self.story.joined(len(self.roster.joined), time.monotonic() - self.started_at)
        else:
            self.story.told(rank, report)

    # Ends -----------------------------------------------------------------------------------------------------------

    def _on_exited(self, node_rank: int, message: wire.Exited) -> None:
        """Record the end of a rank, even of one that was already counted as lost with its node."""
        if message.rank in self.joiners.numbers:
            self.joiners.lose([message.rank], f"ended with {message.signal or message.code}")
            self.joiners.look()
            return
        self.roster.end(message.rank)
        if session := not self.ours and message.steps is not None:
            self.story.session_opened()
        node = self.roster.nodes[node_rank]
        ahead_s, drained = node.clock.seconds, self.draining is not None
        ours = self.ours or session  # a program with a session uses Muster's exit codes
        ending = ending_of(message, node_rank, node.host, ahead_s=ahead_s, ours=ours, drained=drained)
        self._record(ending)
        over = self.draining is not None and not self.roster.running and not self.is_stopping
        if over and any(each.cause == "stopped" for each in self.endings):
            assert self.draining is not None
            self.stop_all(self.draining, self.draining.message, 0.0)  # also end leftovers, such as the store

    def _record(self, ending: RankEnd) -> None:
        self.endings.append(ending)
        self.log.event("exited", attempt=self.number, **vars(ending))
        if ending.cause in ("own", "peer"):
            self.story.failed(ending)
            if self._continues(ending):
                return
            # during a drain that only makes the run grow, a failure still counts
            why = None if self.growing else self.draining
            reason, grace_s = f"{ending.where()} has failed", self.job.grace_s
            by_term = ending.exit_code == exits.SIGNAL_BASE + SIGTERM  # the SIGTERM may be the scheduler's
            if self.draining is None and (by_term or self.unless_noticed):
                self.ask_first(lambda: self.stop_all(None, reason, grace_s))
            else:
                self.stop_all(why, reason, grace_s)

    def _continues(self, ending: RankEnd) -> bool:
        """Return whether the other ranks continue in the next attempt, in the processes that they have."""
        restart = self.job.restart
        if restart is None or restart.in_place != "auto" or self.stays is None:
            return False
        if self.is_stopping or self.unless_noticed:
            return False
        if self.draining is not None and not self.joining:
            return False
        found = self.stays(ending)
        if isinstance(found, str):
            self.regrouping = None
            self.log.tell("not_in_place", attempt=self.number, why=found)
            return False
        self.regrouping, self.story.decided_at = found, time.time()
        return True

    # Joining --------------------------------------------------------------------------------------------------------

    def _join(self) -> None:
        """Make the ranks stop after the same step, because all joiners are ready, unless the attempt is ending."""
        if self.is_stopping or self.draining is not None or self.regrouping is not None:
            return
        self.draining = Stop(exits.REQUEUE, f"{counted(len(self.joiners.ready), 'rank')} joined the others")
        self.growing = self.joining = True
        self.drain_deadline = time.monotonic() + DRAIN_S
        self._tell_all(wire.Hold(self.number))

    def _on_waiting(self, rank: int) -> None:
        """Handle a rank that waits for the next attempt. It begins when all wait that were told to."""
        self.waiting.add(rank)
        if not self.waiting >= self.roster.running or self.is_stopping or self.regrouping is not None:
            return
        if self.joining:
            self.stop, self.regrouping = self.draining, self.joiners.regroup()
        else:
            self.all_wait_at = time.monotonic()

    def _on_swept(self, node_rank: int, message: wire.Swept) -> None:
        """Record that a node has swept: only processes that SIGKILL cannot end are left there."""
        self.roster.swept.add(node_rank)
        if message.left:
            host = self.roster.hosts[node_rank]
            self.startup.warn(f"{host}: {counted(len(message.left), 'process')} cannot be killed; see dmesg there")
            self.stuck.add(node_rank)

    def lose(self, node_rank: int, why: str, code: int, ago_s: float = 0.0) -> None:
        """Record that a node, and with it its remaining ranks, was lost `ago_s` seconds ago."""
        lost = {rank for rank in self.roster.running if self.roster.node_of[rank] == node_rank}
        self.joiners.lose_node(node_rank, why)
        if not lost:  # a joiner of the next attempt may have been lost
            self.regrouping = self.joiners.regroup() if self.regrouping and self.joiners.numbers else self.regrouping
            self.joiners.look()
            return
        self.roster.running -= lost
        # Ranks that lost their connection to this node may have failed before its loss was noticed.
        only_victims = self.stop is None and all(each.cause != "own" for each in self.endings)
        cause: Cause = "own" if not self.is_stopping or only_victims else "stopped"
        host, ended = self.roster.hosts[node_rank], time.time() - ago_s
        self._record(RankEnd(None, node_rank, host, code, None, ended, cause, why))

    def _on_terminated(self, node_rank: int) -> None:
        """Stop the run because a node's agent got SIGTERM. A scheduler sends it to agents and ranks in any order."""
        where = f"node {node_rank} ({self.roster.hosts[node_rank]})"
        stop = Stop(exits.STOPPED, f"SIGTERM on {where}: its scheduler or a user there is ending the job")
        if self.draining is not None:  # another node got the same SIGTERM before
            return
        if self.drain(replace(stop, code=exits.REQUEUE), "SIGTERM"):
            self.told = self.draining
            return
        self.ask_first(lambda: self._end_terminated(stop, node_rank))

    def _end_terminated(self, stop: Stop, node_rank: int) -> None:
        if not self.is_stopping:
            self.stop_all(stop, stop.message, self.job.grace_s)
        elif self.stop is None and all(each.signal == "SIGTERM" for each in self.endings if each.cause == "own"):
            self.stop = stop
        if self.stop is stop:
            host = self.roster.hosts[node_rank]
            self.told, self.told_by = stop, RankEnd(None, node_rank, host, None, "SIGTERM", time.time(), "own")

    # Stopping -------------------------------------------------------------------------------------------------------

    def ask_first(self, end: Callable[[], None], *, limit: bool = False) -> None:
        """End the attempt by calling `end`, but first ask the scheduler whether it is about to end the job.

        `limit`: the scheduler has sent the signal that announces its time limit.
        """
        if self.ask is None or self.is_stopping:
            end()
            return
        self.unless_noticed.append(end)
        if len(self.unless_noticed) == 1:
            self.ask(limit)

    def noticed(self, notice: Notice | None) -> None:
        """Handle the scheduler's answer. If it is about to end the job, the ranks get most of the remaining time."""
        waiting, self.unless_noticed = self.unless_noticed, []
        if notice is None or self.is_stopping:
            for end in waiting:
                end()
            return
        again = notice.reason == PREEMPTED or resumption.continues(self.context, session=self.story.has_session)
        code = exits.REQUEUE if again else exits.TIMEOUT
        left_s = max(0.0, notice.deadline - time.time())
        self.told = Stop(code, notice.message, why=notice.reason)
        self.stop_all(self.told, f"{notice.message}, in {left_s:.0f} s", left_s - min(LEAVING_S, left_s / 4))

    def stop_all(self, stop: Stop | None, reason: str, grace_s: float) -> None:
        """Order every node to stop its ranks. A second call is ignored unless `grace_s` is 0."""
        if not self.is_stopping:
            self.stop = stop
            self.story.decided_at = time.time()
            self.log.event("stopping", attempt=self.number, reason=reason)
            if self.startup.begun and self.roster.running:
                self.console.say(f"stopping the ranks: {reason}")
        elif grace_s > 0:
            return
        self.stop_deadline = time.monotonic() + grace_s + SWEEP_S + max(node.late_s for node in self.roster.nodes)
        why = self.stop.reason if self.stop is not None else "failure"
        self._tell_all(wire.StopRanks(self.number, grace_s, why, reason[:LONGEST_WHY]))

    def drain(self, stop: Stop, by: str, *, growing: bool = False) -> bool:
        """Make all ranks save after the same step and end; return False if that is not possible (any more).

        If a drain is already in progress, `stop` replaces its reason. `growing`: the drain is followed by an attempt on
        more nodes; this is possible only if no drain is in progress.
        """
        saving = bool(self.startup.context.options.get("saving"))
        begun = self.story.first_step is not None and self.regrouping is None
        if not saving or self.is_stopping or not begun or (growing and self.draining is not None):
            return False
        if self.draining is None:
            deadline_s = KILL_WAIT_S if by == "SIGTERM" else DRAIN_S
            self.drain_deadline = time.monotonic() + deadline_s
            self.log.event("draining", attempt=self.number, by=by, deadline_s=deadline_s)
            self._tell_all(wire.Hold(self.number))
        if self.stop_at is None:
            self.joining = False  # save and end instead
        self.draining, self.growing = stop, growing
        self.console.say(f"saving, then stopping: {by}" + ("; press Ctrl-C again to stop at once" * (by == "Ctrl-C")))
        return True

    def _on_held(self, message: wire.Held) -> None:
        """Choose the step after which all ranks save.

        While one rank waits after n steps, no other rank can finish step n + 1, because each step needs all ranks. So
        every rank can still stop after step n + 1.

        Raises:
            ProtocolError: if no order to hold was sent.
        """
        if self.draining is None:
            raise ProtocolError("it was not requested")
        if self.stop_at is None:
            self.stop_at = message.steps + 1
            self._tell_all(wire.StopAt(self.number, self.stop_at, regroups=self.joining))

    def _tell_all(self, message: wire.ToAgent) -> None:
        for rank, node in enumerate(self.roster.nodes):
            if node.is_alive:
                self.send(rank, message)

    # The clock ------------------------------------------------------------------------------------------------------

    def tick(self, now: float, late_s: float = 0.0) -> None:
        """Check the deadlines. The `late_s` seconds in which the supervisor did not run do not count."""
        if self.stop_deadline is not None:
            self.stop_deadline += late_s
            self.overdue = now > self.stop_deadline
            return
        if self.regrouping is not None:  # its ranks wait for the next attempt
            return
        if self.draining is not None and now > self.drain_deadline:
            self.stop_all(self.draining, "the ranks did not save in time", self.job.grace_s)
            return
        if self.all_wait_at is not None and now > self.all_wait_at + ALL_WAIT_S:
            why = "the ranks lost the connections to each other"
            self.stop_all(Stop(exits.UNREACHABLE, why), why, self.job.grace_s)
            return
        self.joiners.tick(now)
        if self.startup.starting:
            self.startup.send_starts()
            self._restart_deadline()
        self.startup.say_waiting(now, self.deadline)
        over_s, limit_s = now - self.deadline, self.deadline - self.started_at
        late = self.roster.late(limit_s, patient=over_s < MEET_S) if over_s > 0 else ""
        if late := late or self.roster.absent(now, self.job.rendezvous_timeout_s, self.console.say):
            self.stop_all(Stop(exits.TIMEOUT, late), late, self.job.grace_s)
        elif self.hangs.hang is not None:
            self._end_hang(now)
        elif self.startup.begun and not self.draining and now - self._looked >= LOOK_S:
            self._looked = now
            self._look_for_hang(now)

    def _look_for_hang(self, now: float) -> None:
        if not self.ours and self.hangs.sees_session():
            self.story.session_opened()
        if (hang := self.hangs.look(now, self.started_at)) is None:
            return
        # A stop for missing output prints its own message.
        tell = self.log.event if hang.phase == OUTPUT else self.log.tell
        tell("hang", attempt=self.number, seconds=hang.seconds, phase=hang.phase)
        if hang.phase == OUTPUT:
            what = f"no rank has written anything for {hang.seconds:.0f} s"
            self.stop_all(Stop(exits.TIMEOUT, f"{what} (hang_s: {hang.limit_s:g})"), what, self.job.grace_s)
            return
        self._tell_all(wire.Dump(self.number))

    def _end_hang(self, now: float) -> None:
        """End the attempt once all stacks have arrived or their deadline has passed."""
        if self.is_stopping or not self.hangs.is_due(now):
            return
        match found := self.hangs.blame():
            case RankEnd():
                self._record(found)
            case Mute():
                self.lose(found.node, found.why, exits.TIMEOUT, found.seconds)
            case Stop():
                self.stop_all(found, "the ranks hang", 0.0)
