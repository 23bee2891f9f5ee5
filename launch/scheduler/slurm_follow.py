"""Follow runs in Slurm's queue to their ends: for `muster run --on slurm` on the login node, sweeps, and `muster stop`.

    it waits, and why ──→ its supervisor begins ──→ rank 0's lines ──→ its last row ──→ the code of its verdict
          │                        │                     │
          └── can never start      └── Slurm has ended the job, and there is no last row: write it

The run folders are read a few times a second. Slurm is asked about all runs in one call, and only while a run has no
supervisor that renews its lease: every 5 s at first, every 30 s in a long wait, every second after a request to stop.
"""

import math
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

from muster.jobs.basics import exits
from muster.jobs.basics.errors import MusterError, StartTimeoutError, UnreachableError
from muster.jobs.runfolder.rundir import RunDir
from muster.launch.records.runrows import number, read_json, real
from muster.launch.records.slurm_job import FROM_OUTSIDE, SlurmJob, forget, last_words, since_submission
from muster.launch.scheduler.held_signals import listening, request_stop
from muster.launch.scheduler.rank_outputs import RunOutput
from muster.launch.scheduler.slurm_run import close, show_end, stopped
from muster.launch.supervision.console import Console
from muster.slurm.states import JobOutcome, JobState, is_hopeless, is_orphan, never_began, outcome, waiting

POLL_S: Final = 0.25
ASK_S, ASK_SOON_S, ASK_RARELY_S = 5.0, 1.0, 30.0
LEASE_S: Final = 6.0  # if a lease misses three renewals, ask Slurm about the job
VERDICT_S: Final = 5.0  # time for the last row of an ended supervisor to become visible here
REQUEUE_S: Final = 10.0  # time for Slurm to report the end of a job that did not end by itself
HOPELESS_S: Final = 30.0
UNKNOWN_S: Final = 30.0
BEYOND_GRACE_S: Final = 10.0
KILL_WAIT_S: Final = 60.0  # Slurm's time between TERM and KILL: 30 s, unless the site sets another one


def follow(run: RunDir, console: Console, asked: list[str] | None = None) -> int:
    """Follow a submitted run to its end and show it. The first Ctrl-C stops the run, the second stops it at once.

    `asked`: the signals that `holding_signals` has held back so far.

    Raises:
        UnreachableError: if the run was never submitted to Slurm.
    """
    follower = RunFollower(run, console)
    with listening([] if asked is None else asked) as asked:
        next(until_ended([follower], asked))
    show_end(run, console, follower.last_row)
    return follower.code or 0


def cancel(runs: Sequence[RunDir], *, grace_s: float | None, now: bool) -> None:
    """Stop waiting or running Slurm runs; return when each has its last row. `grace_s` None: the job's grace period.

    Raises:
        UnreachableError: if a run was never submitted to Slurm, or the controller does not answer.
        RefusedError: if a job belongs to another user.
        StartTimeoutError: if a run does not end in time.
    """
    followers = [RunFollower(run, Console(quiet=True), patient=False) for run in runs]
    open_ = [each for each in followers if not each.is_over()]
    for each in open_:
        each.grace_s = each.grace_s if grace_s is None else grace_s
        each.stop("muster stop", now=now)
    longest_s = max((each.grace_s for each in open_), default=0.0) + BEYOND_GRACE_S + KILL_WAIT_S
    for each in until_ended(open_, [], deadline_s=longest_s):
        each.cancel()  # end the remains of the job, and prevent a requeue
        if each.code == exits.REQUEUE:  # the supervisor was about to requeue the job
            close(each.run, stopped("muster stop", "it waited to be requeued"), anew=True)
        forget(each.run)


def until_ended(
    followers: Sequence["RunFollower"], asked: list[str], *, told: Console | None = None, deadline_s: float = math.inf
) -> Iterator["RunFollower"]:
    """Yield each run once it has its last row. The first new entry in `asked` stops all runs, the second cancels them.

    `told`: the console on which a sweep reports these stops.

    Raises:
        StartTimeoutError: if a run has no last row in time.
        UnreachableError: if the controller does not answer, and the follower is not patient.
    """
    open_, began, answered = list(followers), time.monotonic(), 0
    while open_:
        if time.monotonic() > began + deadline_s + max(each.draining_s for each in open_):
            late = open_[0]
            raise StartTimeoutError(
                f"{late.run.run_id}: asked to stop, but it has not ended within {deadline_s:g} s; see Slurm job "
                f"{late.job.job_id} (scontrol show job {late.job.job_id})"
            )
        for each in open_:
            each.read()
        for by in asked[answered:]:
            if told is not None:
                told.say(f"{'cancelling' if answered else 'stopping'} {len(open_)} points: {by}")
            for each in open_:
                each.stop(by, now=answered > 0)
            answered += 1
        for each in open_:
            each.cancel_if_late()
        _ask([each for each in open_ if each.is_time_to_ask()])
        for each in [each for each in open_ if each.has_ended()]:
            open_.remove(each)
            yield each
        if open_:
            time.sleep(POLL_S)


def _ask(about: Sequence["RunFollower"]) -> None:
    """Ask Slurm about several runs of one cluster in one call."""
    if not about:
        return
    try:
        states = about[0].client.query([each.job.job_id for each in about])
    except MusterError as error:
        if not about[0].patient:
            raise
        about[0].complain(f"muster: cannot ask Slurm: {error}; still trying")
        return
    for each in about:
        each.on_answer(each.job.own(states))


class RunFollower:
    """The follower of one run: the events seen so far, and the messages printed about it.

    With `patient`, it keeps waiting for a controller that does not answer. `trouble`: the console for messages about
    such a controller (default: `console`).
    """

    def __init__(self, run: RunDir, console: Console, *, patient: bool = True, trouble: Console | None = None) -> None:
        job = SlurmJob.read(run)
        if job is None:
            raise UnreachableError(f"{run.path}: has no slurm.json: it was not submitted to Slurm")
        self.run, self.console, self.job, self.client = run, console, job, job.client()
        self.patient, self.trouble = patient, trouble or console
        self.ended: dict[str, Any] | None = None
        self.begun = False
        self.requeued = False  # the job waits again, so an existing last row belongs to an earlier start
        self.grace_s = 5.0
        self.draining_s = 0.0  # extra time for the supervisor to save before it stops
        self._output = RunOutput(run, console, offset=since_submission(run, job), on_row=self._on_event)
        self._stop_by = ""
        self._kill_at = math.inf
        self._cancelled = False
        self._waits = True  # whether the job waits, according to Slurm's last answer
        self._instead: JobOutcome | None = None  # the outcome to record for a job that the follower cancelled by itself
        self._began = time.monotonic()
        self._next_ask = 0.0
        self._lease: tuple[Any, float] = (None, 0.0)
        self._since: dict[str, float] = {}  # {condition that must last before it counts: when it was first seen}
        self._said = ""

    @property
    def last_row(self) -> dict[str, Any]:
        """The run's last row; {} while it has none."""
        return self.ended or {}

    @property
    def code(self) -> int | None:
        """The exit code of the last row."""
        return number(self.last_row.get("code"))

    def has_ended(self) -> bool:
        """Return whether the run has its last row and will not be requeued; if so, show the rest of its output."""
        if self.ended is None or self._may_be_queued_again():
            return False
        self._output.pass_on(last=True)
        return True

    def stop(self, by: str, *, now: bool) -> None:
        """Cancel a waiting job, or ask the supervisor of a running one to stop. A second call cancels the job."""
        self._next_ask = 0.0
        again, self._stop_by = bool(self._stop_by), by
        if self.ended is not None:
            self._wait_anew()
        if self.begun and not again:
            self.console.say(f"stopping the run: {by}")
            request_stop(self.run, self.grace_s, now=now, who=by)
            self._kill_at = time.monotonic() + self.grace_s + BEYOND_GRACE_S
            return
        self.console.say(f"cancelling Slurm job {self.job.job_id}: {by}")
        self.cancel()

    def is_over(self) -> bool:
        """Return whether the run has ended for good. If Slurm may start its job again, treat it as waiting from now on.

        Raises:
            RefusedError, UnreachableError: if Slurm cannot be asked from here.
        """
        self.read()
        if self.ended is None or self.code not in FROM_OUTSIDE:
            return self.ended is not None
        state = self.job.ask()
        if state is None or state.phase == "over":
            return True
        self._wait_anew()
        return False

    def _wait_anew(self) -> None:
        """Ignore the last row, which belongs to an earlier start, and wait for the next start."""
        self.ended, self.begun, self.requeued = None, False, True

    # The run folder -------------------------------------------------------------------------------------------------

    def read(self) -> None:
        """Read the rows since the last call, print the messages for them, and show the ranks' output."""
        self._output.read()

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
            case "draining":
                self.draining_s = real(row.get("deadline_s")) or 0.0
                self._kill_at += self.draining_s
            case "requeueing":
                self.console.say(f"Slurm job {self.job.job_id}: its supervisor requeues it")
            case "ended":
                self.ended = row
                self._since.pop("stopped", None)

    def _has_lease(self) -> bool:
        """Return whether a supervisor renews its lease, judged by changes of the lease, because clocks may differ."""
        found = read_json(self.run.lease).get("time")
        if found is not None and found != self._lease[0]:
            self._lease = (found, time.monotonic())
        return time.monotonic() - self._lease[1] < LEASE_S

    # Slurm ----------------------------------------------------------------------------------------------------------

    def is_time_to_ask(self) -> bool:
        """Return whether to ask Slurm about the run now."""
        now = time.monotonic()
        if now < self._next_ask:
            return False
        hurried = self._stop_by or self.ended is not None
        if has_lease := self._has_lease() and not hurried:
            wait_s = ASK_SOON_S  # check the lease again after this time
        else:
            wait_s = ASK_SOON_S if hurried else min(ASK_RARELY_S, max(ASK_S, (now - self._began) / 12))
        self._next_ask = now + wait_s
        return not has_lease

    def on_answer(self, state: JobState | None) -> None:
        """Handle Slurm's answer about the job. `state`: None if Slurm does not know the job."""
        if state is None:
            self._on_unknown()
            return
        self._waits = state.phase == "pending"
        self._since.pop("unknown", None)
        if state.phase != "over":
            self._since.pop("over", None)
        {"pending": self._on_pending, "running": self._on_running, "over": self._on_over}[state.phase](state)

    def _on_unknown(self) -> None:
        job = f"Slurm job {self.job.job_id}"
        of_array = "_" in self.job.job_id  # Slurm forgets elements of an array that were cancelled while waiting
        if self.ended is not None:
            self._since.setdefault("over", time.monotonic())
        elif of_array and self._waits and not self.begun and (self._cancelled or self._lasts("unknown", VERDICT_S)):
            self._close(self._instead or stopped(self._stop_by or "scancel", f"{job} waited"))
        elif self._lasts("unknown", UNKNOWN_S):
            words = f"Slurm no longer knows job {self.job.job_id}, and its supervisor left no verdict"
            self._close(JobOutcome(exits.UNREACHABLE, words))

    def _on_pending(self, state: JobState) -> None:
        if self.ended is not None and not self._stop_by:
            self.ended = None
        self.requeued |= self.begun
        self.begun = False  # no supervisor could handle a stop request now
        self._say_once(f"Slurm job {self.job.job_id}: {'queued again: ' * self.requeued}{waiting(state)}")
        if not is_hopeless(state):
            self._since.pop("hopeless", None)
        elif self._lasts("hopeless", HOPELESS_S) and self._instead is None:
            message = f"Slurm job {self.job.job_id} was cancelled, because it would never start: {waiting(state)}"
            self._instead = JobOutcome(exits.REFUSED, message)
            self.cancel()

    def _on_running(self, state: JobState) -> None:
        if is_orphan(state) and self._instead is None:
            self._instead = outcome(state)
            self.cancel()
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
        """Return whether Slurm may still restart the job, because the run did not end by itself."""
        code = self.code
        if self._stop_by or code not in FROM_OUTSIDE or "over" in self._since:
            return False
        return not self._lasts("stopped", REQUEUE_S if code != exits.REQUEUE else KILL_WAIT_S)

    def cancel(self) -> None:
        """Cancel the job, unless it is cancelled already. If the controller does not answer, try again later."""
        if self._cancelled:
            return
        try:
            self.client.cancel(self.job.job_id)
            self._cancelled = True
        except UnreachableError as error:
            if not self.patient:
                raise
            self.trouble.say(f"muster: {error}; still trying")
            self._kill_at = time.monotonic() + ASK_S

    def cancel_if_late(self) -> None:
        """Cancel the job if its supervisor was asked to stop and has not stopped in time."""
        if time.monotonic() > self._kill_at:
            self._kill_at = math.inf
            self.cancel()

    def complain(self, text: str) -> None:
        """Print once the reason why Slurm cannot be asked."""
        if text != self._said:
            self._said = text
            self.trouble.say(text)

    def _close(self, result: JobOutcome) -> None:
        close(self.run, result, anew=self.requeued and self.ended is None)
        self.read()

    def _lasts(self, what: str, seconds: float) -> bool:
        """Return whether a condition has held for `seconds`; the first call starts the clock."""
        return time.monotonic() - self._since.setdefault(what, time.monotonic()) > seconds

    def _say_once(self, text: str) -> None:
        if text != self._said:
            self._said = text
            self.console.say(text)
