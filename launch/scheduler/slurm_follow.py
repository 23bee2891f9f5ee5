"""Stay with a run in Slurm's queue to its end: `muster run --on slurm` on the login node, and `muster stop`.

    it waits, and why ──→ its supervisor begins ──→ rank 0's lines ──→ its last row ──→ the code of its verdict
          │                        │                     │
          └── never can start      └── over for Slurm, or let go of, and no last row: we write it

The run folder is read, a few times a second. Slurm is asked only while no supervisor renews the lease, every 5 s at
first and every 30 s in a long wait; after a request to stop, every second.
"""

import math
import time
from typing import Any, Final

from muster.jobs.basics import exits
from muster.jobs.basics.errors import MusterError, StartTimeoutError, UnreachableError
from muster.jobs.runfolder.rundir import RunDir
from muster.launch.common.fields import typed_line
from muster.launch.common.follow import LineFollower
from muster.launch.records.event_texts import lines_of
from muster.launch.records.runrows import number, read_json, real
from muster.launch.records.slurm_job import FROM_OUTSIDE, SlurmJob, forget, last_words, since_submission
from muster.launch.scheduler.held_signals import listening, request_stop
from muster.launch.scheduler.rank_outputs import RankOutputs
from muster.launch.scheduler.slurm_run import close, show_end, stopped
from muster.launch.supervision.console import Console
from muster.slurm.states import JobState, Outcome, is_hopeless, is_orphan, never_began, outcome, waiting

POLL_S: Final = 0.25
ASK_S, ASK_SOON_S, ASK_RARELY_S = 5.0, 1.0, 30.0
LEASE_S: Final = 6.0  # three renewals: a lease that does not change for so long is asked about
VERDICT_S: Final = 5.0  # for the last row of a supervisor that has ended to be seen here
REQUEUE_S: Final = 10.0  # for Slurm to say what becomes of a job that was stopped from outside
HOPELESS_S: Final = 30.0
UNKNOWN_S: Final = 30.0
BEYOND_GRACE_S: Final = 10.0
KILL_WAIT_S: Final = 60.0  # that Slurm gives a job between TERM and KILL: 30 s, unless the site says otherwise


def follow(run: RunDir, console: Console, asked: list[str] | None = None) -> int:
    """Follow a submitted run to its end and show it; the first Ctrl-C stops it, the second one at once.

    `asked` is what `holding_signals` has held back so far.

    Raises:
        UnreachableError: it was never submitted to Slurm.
    """
    follower = Follower(run, console, asked=asked)
    with listening(follower.asked_to_stop):
        ended = follower.until_ended()
    show_end(run, console, ended)
    return number(ended.get("code")) or 0


def cancel(run: RunDir, *, grace_s: float, now: bool) -> None:
    """Stop a run in Slurm, waiting or running, and return when it has its last row.

    Raises:
        UnreachableError: it was never submitted to Slurm, or the controller does not answer.
        RefusedError: it is somebody else's job.
        StartTimeoutError: it has not ended in time.
    """
    follower = Follower(run, Console(quiet=True), patient=False)
    follower.read_events()
    if follower.is_over():
        return
    follower.stop("muster stop", grace_s, now=now)
    ended = follower.until_ended(deadline_s=grace_s + BEYOND_GRACE_S + KILL_WAIT_S)
    follower.client.cancel(follower.job.job_id)  # whatever is left of the job; and it is not queued again
    if number(ended.get("code")) == exits.REQUEUE:  # it was being ended for another reason when we asked
        close(run, stopped("muster stop", "it was to be queued again"), anew=True)
    forget(run)


class Follower:
    """What has been seen of one run so far, and what was said of it."""

    def __init__(self, run: RunDir, console: Console, *, patient: bool = True, asked: list[str] | None = None) -> None:
        job = SlurmJob.read(run)
        if job is None:
            raise UnreachableError(f"{run.path}: has no slurm.json: it was not submitted to Slurm")
        self.run, self.console, self.job, self.client = run, console, job, job.client()
        self.patient = patient  # wait for a controller that does not answer, rather than give up
        self.ended: dict[str, Any] | None = None
        self.begun = False
        self.requeued = False  # it waits again: a last row is that of an earlier try
        self.grace_s = 5.0
        self._events = LineFollower(run.events, offset=since_submission(run, job))
        self._outputs = RankOutputs(console)
        self.asked_to_stop = [] if asked is None else asked
        self._stop_by = ""
        self._kill_at: float | None = None
        self._draining_s = 0.0  # that its supervisor may take to save before it stops
        self._instead: Outcome | None = None  # the outcome of a job that we have cancelled for a reason of ours
        self._began = time.monotonic()
        self._next_ask = 0.0
        self._lease: tuple[Any, float] = (None, 0.0)
        self._since: dict[str, float] = {}  # when something was first seen that must last to count
        self._said = ""

    def until_ended(self, deadline_s: float = math.inf) -> dict[str, Any]:
        """Return the run's last row, once it has one.

        Raises:
            StartTimeoutError: it has none in time.
        """
        began = time.monotonic()
        while time.monotonic() < began + deadline_s + self._draining_s:
            self.read_events()
            self._outputs.pass_on()
            for by in self.asked_to_stop:
                self.stop(by, self.grace_s, now=bool(self._stop_by))
            self.asked_to_stop.clear()
            if self._kill_at is not None and time.monotonic() > self._kill_at:
                self._kill_at = None
                self._cancel()
            if self._is_time_to_ask():
                self._ask()
            if self.ended is not None and not self._may_be_queued_again():
                self._outputs.pass_on(last=True)
                return self.ended
            time.sleep(POLL_S)
        raise StartTimeoutError(
            f"{self.run.run_id}: asked to stop, but it has not ended within {deadline_s:g} s; see Slurm job "
            f"{self.job.job_id} (scontrol show job {self.job.job_id})"
        )

    def stop(self, by: str, grace_s: float, *, now: bool) -> None:
        """Have a waiting job cancelled, and a running one stopped by its supervisor; a second call cancels it too."""
        self._next_ask = 0.0
        again, self._stop_by = bool(self._stop_by), by
        if self.ended is not None:
            self._wait_anew()
        if self.begun and not again:
            self.console.say(f"stopping the run: {by}")
            request_stop(self.run, grace_s, now=now, who=by)
            self._kill_at = time.monotonic() + grace_s + BEYOND_GRACE_S
            return
        self.console.say(f"cancelling Slurm job {self.job.job_id}: {by}")
        self._cancel()

    def is_over(self) -> bool:
        """Say whether the run has ended for good; one that Slurm will begin again waits from now on.

        Raises:
            RefusedError, UnreachableError: Slurm cannot be asked from here.
        """
        if self.ended is None or number(self.ended.get("code")) not in FROM_OUTSIDE:
            return self.ended is not None
        state = self.job.ask()
        if state is None or state.phase == "over":
            return True
        self._wait_anew()
        return False

    def _wait_anew(self) -> None:
        """Take the last row for that of an earlier start."""
        self.ended, self.begun, self.requeued = None, False, True

    # The run folder -------------------------------------------------------------------------------------------------

    def read_events(self) -> None:
        """Take in the rows that came since the last call, and say what is worth it."""
        for line in self._events.poll():
            self._on_event(typed_line(line))

    def _on_event(self, row: dict[str, Any]) -> None:
        match row.get("event"):
            case "submitted":
                self.ended, self._said = None, ""
                self.grace_s = real(row.get("grace_s")) or self.grace_s
                if (row.get("host"), number(row.get("pid"))) != (self.job.host, self.job.pid):
                    self.begun = True
                    self.console.say(f"Slurm job {self.job.job_id}: its supervisor is on {row.get('host')}")
            case "attempt":
                self.ended = None
                self._outputs.begin(self.run.attempt(number(row.get("attempt")) or 0))
            case "attempt_ended":
                self._outputs.pass_on(last=True)
            case "draining":
                self._draining_s = real(row.get("deadline_s")) or 0.0
                self._kill_at = None if self._kill_at is None else self._kill_at + self._draining_s
            case "requeueing":
                self.console.say(f"Slurm job {self.job.job_id}: its supervisor has it queued again")
            case "ended":
                self.ended = row
                self._since.pop("stopped", None)
        for line in lines_of(row):
            self.console.say(line)

    def _has_lease(self) -> bool:
        """Say whether a supervisor shows that it is there; a lease that changes is enough, whatever its clock says."""
        found = read_json(self.run.lease).get("time")
        if found is not None and found != self._lease[0]:
            self._lease = (found, time.monotonic())
        return time.monotonic() - self._lease[1] < LEASE_S

    # Slurm ----------------------------------------------------------------------------------------------------------

    def _is_time_to_ask(self) -> bool:
        now = time.monotonic()
        if now < self._next_ask or (self._has_lease() and not self._stop_by and self.ended is None):
            return False
        hurried = self._stop_by or self.ended is not None
        self._next_ask = now + (ASK_SOON_S if hurried else min(ASK_RARELY_S, max(ASK_S, (now - self._began) / 12)))
        return True

    def _ask(self) -> None:
        try:
            state = self.job.ask()
        except MusterError as error:
            if not self.patient:
                raise
            self._say_once(f"muster: cannot ask about Slurm job {self.job.job_id}: {error}; still trying")
            return
        if state is None:
            if self._lasts("unknown", UNKNOWN_S):
                words = f"Slurm does not know job {self.job.job_id} any more, and its supervisor left no verdict"
                self._close(Outcome(exits.UNREACHABLE, words))
            return
        self._since.pop("unknown", None)
        if state.phase != "over":
            self._since.pop("over", None)
        {"pending": self._on_pending, "running": self._on_running, "over": self._on_over}[state.phase](state)

    def _on_pending(self, state: JobState) -> None:
        if self.ended is not None and not self._stop_by:
            self.ended = None
        self.requeued |= self.begun
        self.begun = False  # nobody is there now to hear of a stop
        self._say_once(f"Slurm job {self.job.job_id}: {'queued again: ' * self.requeued}{waiting(state)}")
        if not is_hopeless(state):
            self._since.pop("hopeless", None)
        elif self._lasts("hopeless", HOPELESS_S) and self._instead is None:
            message = f"Slurm job {self.job.job_id} was cancelled, for it would never start: {waiting(state)}"
            self._instead = Outcome(exits.REFUSED, message)
            self._cancel()

    def _on_running(self, state: JobState) -> None:
        if is_orphan(state) and self._instead is None:
            self._instead = outcome(state)
            self._cancel()
        elif not self.begun and state.state == "RUNNING":
            self._say_once(f"Slurm job {self.job.job_id} runs on {state.nodes}")

    def _on_over(self, state: JobState) -> None:
        self._next_ask = time.monotonic() + VERDICT_S
        if self._lasts("over", VERDICT_S) or ((self._stop_by or never_began(state)) and not self.begun):
            said = last_words(self.run, self.job)
            if self._instead is None and not self._stop_by:
                for line in said.splitlines():
                    self.console.say(f"  {line}")
            asked = stopped(self._stop_by, f"Slurm job {state.job_id} {'ran' if self.begun else 'waited'}")
            self._close(self._instead or (asked if self._stop_by else outcome(state, said)))

    def _may_be_queued_again(self) -> bool:
        """Say whether Slurm may still start the job again: its last row says that something outside ended it."""
        code = number((self.ended or {}).get("code"))
        if self._stop_by or code not in FROM_OUTSIDE or "over" in self._since:
            return False
        return not self._lasts("stopped", REQUEUE_S if code != exits.REQUEUE else KILL_WAIT_S)

    def _cancel(self) -> None:
        try:
            self.client.cancel(self.job.job_id)
        except UnreachableError as error:
            if not self.patient:
                raise
            self.console.say(f"muster: {error}; still trying")
            self._kill_at = time.monotonic() + ASK_S

    def _close(self, result: Outcome) -> None:
        close(self.run, result, anew=self.requeued and self.ended is None)
        self.read_events()

    def _lasts(self, what: str, seconds: float) -> bool:
        """Say whether something has been so for a while; the first call begins the while."""
        return time.monotonic() - self._since.setdefault(what, time.monotonic()) > seconds

    def _say_once(self, text: str) -> None:
        if text != self._said:
            self._said = text
            self.console.say(text)
