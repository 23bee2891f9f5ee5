"""Count fruitless starts of the scheduler's job that was submitted for a run, and requeue the job after a drain.

The supervisor's process calls `begin` before the run and `end` after it.

    begin   record the start; compare Slurm's count of starts; refuse after too many without a new checkpoint
    end     75 (drained with a commit) ──running──→ scontrol requeue ──→ Slurm starts launch.supervise again
                     │                   └── cancelled, or queued again by Slurm itself: nothing to do
                     └── not allowed, or scontrol fails: exit 75, for the site's RequeueExit=75, or muster resume
"""

import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from muster.jobs.basics import exits
from muster.jobs.basics.errors import MusterError
from muster.jobs.runfolder.rundir import RunDir
from muster.jobs.spec.slurm import SlurmSettings
from muster.launch.common.event_rows import typed_lines
from muster.launch.plan.submission import Submission
from muster.launch.records.eventlog import EventLog
from muster.launch.records.runrows import had_session
from muster.launch.records.verdict import RankEnd, Stop
from muster.launch.scheduler.allocations import EVENT, MAX_FRUITLESS, allocations, disagreement, fruitless
from muster.launch.scheduler.slurm_output import BatchOutput
from muster.launch.scheduler.slurm_run import close, settings_of
from muster.slurm.allocation import inside_allocation, read_allocation
from muster.slurm.client import LIST_S, RUNNING, Client
from muster.slurm.notice import Notice, notice_of
from muster.slurm.states import JobOutcome


@dataclass(frozen=True)
class OwnJob:
    """The scheduler's job that was submitted for a run, and in which the run's supervisor runs."""

    submission: Submission
    settings: SlurmSettings
    job: str  # the job's id for scontrol
    restarts: int | None  # Slurm's count of earlier starts; None if Slurm does not report one
    output: BatchOutput
    environ: Mapping[str, str]

    @property
    def run(self) -> RunDir:
        """The run's folder."""
        return self.submission.context.run

    @property
    def by_us(self) -> bool:
        """True when Muster has to requeue the job, False when submitit does."""
        return self.submission.route.transport == "slurm"

    @property
    def saves(self) -> bool:
        """True when the run makes checkpoints; for a user's program, when it has opened a session."""
        job = self.submission.context.job
        return had_session(self.run) if job.kind == "command" else job.checkpoint is not None

    def begin(self) -> JobOutcome | None:
        """Record that the job has started; return the run's outcome if it must not continue."""
        found = allocations(typed_lines(self.run.events), self.job)
        if self.restarts is not None and (text := disagreement(found, self.restarts, self.job)):
            self._warn(text)
        EventLog(self.run).event(EVENT, job=self.job, restarts=len(found) if self.restarts is None else self.restarts)
        count = fruitless(found, self.restarts)
        return self._hopeless(count) if count >= MAX_FRUITLESS and self.saves else None

    def cause(self, first: RankEnd | None) -> Stop | None:
        """Return why Slurm ended an attempt, according to its messages in the batch output; None if it did not."""
        return self.output.cause(first)

    def notice(self, *, limit: bool) -> Notice | None:
        """Ask Slurm whether it is about to end the job. `limit`: Slurm has announced the time limit."""
        client, state = Client(self.environ), None
        try:
            state = client.details(self.job, LIST_S)
            # scontrol shows no end time for a job without a limit
            if state and state.preempted and state.end_time is None:
                grace_s = client.grace_s(self.environ.get("SLURM_JOB_PARTITION", ""))
                state = replace(state, end_time=state.preempted + grace_s)
        except MusterError as error:
            self._warn(f"cannot ask Slurm why it signals the job: {error}")
        return notice_of(state, time.time(), self.settings.signal_s, limit=limit)

    def end(self, code: int) -> int:
        """Requeue the job if the verdict asks for it; return the exit code of this process."""
        if code != exits.REQUEUE:
            return code
        count = fruitless(allocations(typed_lines(self.run.events), self.job))
        if count >= MAX_FRUITLESS and self.saves:
            return self._hopeless(count).code
        return self._queue_again() if self.by_us else code

    def _queue_again(self) -> int:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Slurm sends SIGTERM as soon as it has accepted the requeue
        why = f"{self.run.submission.name} says slurm.requeue: false"
        if self.settings.requeue:
            client, complaint = Client(self.environ), self.output.complaint()
            state = client.word(self.job)
            if self.run.stop.exists():  # the user asked for a stop while the supervisor was already stopping
                return self._stopped("stopped by muster stop")
            if state != RUNNING and complaint is not None and complaint.again:
                return exits.REQUEUE
            if state != RUNNING and complaint is not None and complaint.code == exits.STOPPED:
                return self._stopped(complaint.message)
            EventLog(self.run).event("requeueing", job=self.job)
            # This ends the job: Slurm signals all its processes as soon as it has accepted the requeue.
            if not (refused := client.refused("scontrol", "requeue", self.job)):
                onward = ", and continues from its checkpoint" * self.saves
                print(f"muster: Slurm job {self.job} is queued again{onward}", file=sys.stderr)
                return exits.REQUEUE
            why = f"scontrol requeue {self.job}: {refused}"
        self._warn(
            f"{why}; the job ends with code {exits.REQUEUE}, which requeues it at a site with "
            f"RequeueExit={exits.REQUEUE}; otherwise continue with: {self.run.command('resume')}"
        )
        return exits.REQUEUE

    def _stopped(self, message: str) -> int:
        """Record that the run has ended, because it was stopped instead of being requeued."""
        close(self.run, JobOutcome(exits.STOPPED, f"{message}, after a save"), anew=True)
        return exits.STOPPED

    def _hopeless(self, count: int) -> JobOutcome:
        """End the run, because every further start would fail like the last ones."""
        outcome = JobOutcome(
            exits.DO_NOT_RESTART,
            f"{count} starts of job {self.job} in a row have made no new checkpoint, so it is not queued again; raise "
            f"slurm.time, or save more often (checkpoint.every_s), then: {self.run.command('resume')}",
        )
        close(self.run, outcome, anew=True)
        print(f"muster: {outcome.message}", file=sys.stderr)
        return outcome

    def _warn(self, text: str) -> None:
        EventLog(self.run).event("warning", text=text)
        print(f"muster: warning: {text}", file=sys.stderr)


def own_job(submission: Submission, environ: Mapping[str, str]) -> OwnJob | None:
    """Return the run's own Slurm or submitit job if this process is in it; None in a user's own allocation.

    Raises:
        RefusedError: if the environment variables of the job contradict each other.
    """
    context, transport = submission.context, submission.route.transport
    run = context.run
    if transport not in ("slurm", "submitit") or not (run.sbatch.exists() or run.slurm.exists()):
        return None
    job, restarts = "", None
    if inside_allocation(environ):
        allocation = read_allocation(environ)
        job, restarts = allocation.requeue_id, allocation.restarts
    return OwnJob(submission, settings_of(context), job, restarts, BatchOutput(run, job), environ)
