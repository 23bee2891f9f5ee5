"""Follow the points of a sweep through Slurm's queue: all run folders, and one squeue for all, until each has its end.

The first Ctrl-C cancels what waits and asks the supervisors of what runs to stop it; the second cancels all.
"""

import time
from collections.abc import Iterable, Sequence
from typing import Final

from muster.jobs.basics import exits
from muster.jobs.basics.errors import MusterError
from muster.jobs.runfolder.rundir import RunDir
from muster.launch.records.runrows import Rows, read_rows
from muster.launch.records.slurm_job import SlurmJob, has_begun, last_words
from muster.launch.scheduler.held_signals import listening, request_stop
from muster.launch.scheduler.slurm_run import close, stopped
from muster.launch.sweeps.sweep import Point, say
from muster.slurm.client import Client
from muster.slurm.states import JobState, Outcome, is_hopeless, is_orphan, outcome, waiting

POLL_S: Final = 0.25
ASK_S: Final = 5.0
ASK_SOON_S: Final = 1.0
VERDICT_S: Final = 5.0  # for the last row of a supervisor that has ended to be seen here
HOPELESS_S: Final = 30.0
UNKNOWN_S: Final = 30.0
BEYOND_GRACE_S: Final = 10.0


class Followed:
    """What has been seen of one point."""

    def __init__(self, point: Point, run: RunDir, job: SlurmJob) -> None:
        self.point, self.run, self.job = point, run, job
        self.rows: Rows = read_rows(self.run)
        self.state: JobState | None = None
        self.cancelled = False
        self._waited = True  # as far as Slurm has told last
        self._size = -1
        self._since: dict[str, float] = {}

    @property
    def begun(self) -> bool:
        """True once a supervisor has taken over."""
        return has_begun(self.job, self.rows)

    @property
    def code(self) -> int | None:
        """The exit code of the last row."""
        return (self.rows.ended or {}).get("code")

    def look(self) -> None:
        """Read the events again, if there are more."""
        size = self.run.events.stat().st_size
        if size != self._size:
            self._size, self.rows = size, read_rows(self.run)

    def is_over(self, *, stopping: bool) -> bool:
        """Say whether nothing more will come: a run that something outside has stopped may be queued again."""
        if self.rows.ended is None:
            return False
        if stopping or self.code not in (exits.STOPPED, exits.REQUEUE):
            return True
        return self.state is None or self.state.phase == "over"

    def judge(self, state: JobState | None, stopped_by: str) -> Outcome | None:
        """Take Slurm's word; return the end of a point whose supervisor will not write it."""
        self.state = state
        phase: str = "unknown" if state is None else "orphan" if is_orphan(state) else state.phase
        if state is not None and is_hopeless(state):
            phase = "hopeless"
        self._waited = self._waited if state is None else state.phase == "pending"
        self._since = {phase: self._since.get(phase, time.monotonic())}
        lasted_s = time.monotonic() - self._since[phase]
        if self.rows.ended is not None:
            return None
        if state is None:
            return self._forgotten(lasted_s, stopped_by)
        if phase == "hopeless" and lasted_s > HOPELESS_S:
            return Outcome(exits.REFUSED, f"Slurm job {self.job.job_id} would never start: {waiting(state)}")
        if phase == "orphan" or (phase == "over" and (lasted_s > VERDICT_S or not self.begun)):
            if stopped_by:
                return stopped(stopped_by, f"Slurm job {self.job.job_id} {'ran' if self.begun else 'waited'}")
            return outcome(state, last_words(self.run, self.job))
        return None

    def _forgotten(self, lasted_s: float, stopped_by: str) -> Outcome | None:
        """Judge a point that Slurm does not know: of an array it forgets elements cancelled as they waited."""
        job = f"Slurm job {self.job.job_id}"
        if self._waited and not self.begun and (self.cancelled or lasted_s > VERDICT_S):
            return stopped(stopped_by or "scancel", f"{job} waited")
        words = f"Slurm does not know job {self.job.job_id} any more, and its supervisor left no verdict"
        return Outcome(exits.UNREACHABLE, words) if lasted_s > UNKNOWN_S else None


def follow(
    points: Iterable[tuple[Point, RunDir]], *, requests: Sequence[str] = (), grace_s: float | None = None
) -> bool:
    """Follow the points that were submitted until all have ended; return False when the user ended the sweep.

    `requests` name who has already asked for the end: one stops what runs and cancels what waits, two cancel all.
    `grace_s` is then the time between TERM and KILL, unless it is that of the job.

    Raises:
        RunFolderError: a slurm.json is damaged.
    """
    jobs = [(point, run, SlurmJob.read(run)) for point, run in points if run.path.is_dir()]
    open_ = [Followed(point, run, job) for point, run, job in jobs if job is not None]
    if not open_:
        return True
    client = open_[0].job.client()
    total, next_ask, kill_at, answered = len(open_), 0.0, 0.0, 0
    with listening(list(requests)) as asked:
        while open_:
            for each in open_:
                each.look()
            if len(asked) > answered:
                answered = len(asked)
                kill_at = _stop(open_, client, asked[-1], now=answered > 1, given_s=grace_s)
                next_ask = 0.0
            if kill_at and time.monotonic() > kill_at and not all(each.cancelled for each in open_):
                kill_at = _stop(open_, client, asked[-1], now=True)
            if time.monotonic() >= next_ask:
                _ask(open_, client, asked[-1] if asked else "")
                next_ask = time.monotonic() + (ASK_SOON_S if asked else ASK_S)
            for each in [each for each in open_ if each.is_over(stopping=bool(asked))]:
                open_.remove(each)
                ended = each.rows.ended or {}
                say(f"[{total - len(open_)}/{total}] {each.point.label}: {ended.get('class')}")
            time.sleep(POLL_S)
    return not asked


def _ask(open_: Sequence[Followed], client: Client, stopped_by: str) -> None:
    """Ask Slurm about all at once, and write the last rows that nobody else will."""
    try:
        states = client.query([each.job.job_id for each in open_])
    except MusterError as error:
        say(f"muster: cannot ask Slurm: {error}; still trying")
        return
    for each in open_:
        end = each.judge(states.get(each.job.job_id), stopped_by)
        if end is None:
            continue
        if each.state is not None and each.state.phase != "over":
            _cancel([each], client)
        close(each.run, end)
        each.look()


def _stop(open_: Sequence[Followed], client: Client, by: str, *, now: bool, given_s: float | None = None) -> float:
    """Ask the supervisors of what runs to end it, and cancel what waits; return when all is to be cancelled, 0: is."""
    say(f"{'cancelling' if now else 'stopping'} {len(open_)} points: {by}")
    running = [] if now else [each for each in open_ if each.begun and each.rows.ended is None]
    grace_s = 0.0
    for each in running:
        grace_s = max(grace_s, each.rows.submitted.get("grace_s", 0.0) if given_s is None else given_s)
        request_stop(each.run, given_s, text=f"stopped by {by}")
    _cancel([each for each in open_ if each not in running], client)
    return time.monotonic() + grace_s + BEYOND_GRACE_S if running else 0.0


def _cancel(which: Sequence[Followed], client: Client) -> None:
    for each in which:
        if each.cancelled:
            continue
        try:
            client.cancel(each.job.job_id)
            each.cancelled = True
        except MusterError as error:
            say(f"muster: {error}")
