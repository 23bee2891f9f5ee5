"""The Slurm job of a run: its id in `slurm.json`, and its state in Slurm when the run folder is inconclusive.

The run folder is read first. While the supervisor renews the lease, Slurm is not asked. Before the supervisor has
started and after it is gone, squeue is asked, then scontrol, then sacct.

    no lease yet      pending: why it waits        running: the supervisor is about to begin
    lease is stale    over: how Slurm ended it     pending: queued again        running, but let go of its first node
"""

import contextlib
import math
import os
import re
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from muster.jobs.basics import exits
from muster.jobs.basics.errors import MusterError, RunFolderError
from muster.jobs.basics.files import write_json
from muster.jobs.basics.reading import LONGEST_LINE_BYTES, open_file, target_of
from muster.jobs.runfolder.rundir import RunDir
from muster.launch.common.fields import typed, typed_line
from muster.launch.common.follow import tail_lines
from muster.launch.records import lease
from muster.launch.records.runrows import Rows, number, read_json, read_rows
from muster.slurm.client import Client
from muster.slurm.script import OUTPUT
from muster.slurm.states import JobOutcome, JobState, is_orphan, outcome, waiting

# Variables by which Slurm's commands find the cluster. `muster status` may be called from a shell without them.
KEPT: Final = ("SLURM_CONF", "SLURM_CLUSTERS")
# Exit codes of runs ended by a failed node, a preemption, the time limit or an operator. Slurm may requeue them.
FROM_OUTSIDE: Final = (exits.STOPPED, exits.REQUEUE, exits.INFRASTRUCTURE, exits.UNREACHABLE)
LAST_LINES: Final = 20
ASK_S: Final = 5.0


@dataclass(frozen=True)
class SlurmJob:
    """The content of `slurm.json`. `name` is the job's; `host` and `pid` are those of the submitting process."""

    job_id: str
    name: str
    cluster: str | None = None
    time: float = 0.0
    host: str = ""
    pid: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, run: RunDir) -> "SlurmJob | None":
        """Read the job of a run; return None if the run was not queued.

        Raises:
            RunFolderError: if the file does not belong to this user.
        """
        if not run.slurm.exists():
            return None
        record = read_json(run.slurm)
        row, environment = typed(record), record.get("environment")
        job_id, cluster = str(row.get("job_id")), row.get("cluster")
        if not re.fullmatch(r"[0-9]+(_[0-9]+)?", job_id) or not re.fullmatch(r"[\w.,@-]+", str(cluster)):
            raise RunFolderError(f"{run.slurm}: names no Slurm job; see squeue --name={run.run_id}")
        return cls(
            job_id,
            str(row.get("name", "")),
            None if cluster is None else str(cluster),
            row.get("time", 0.0),
            row.get("host", ""),
            row.get("pid", 0),
            kept_environment(environment if isinstance(environment, dict) else {}),
        )

    def write(self, run: RunDir) -> None:
        """Write `slurm.json`. Errors as for `jobs.runfolder.rundir.write_json`."""
        write_json(run.slurm, asdict(self))

    def client(self) -> Client:
        """Return the client commands for the job's cluster."""
        conf = self.environment.get("SLURM_CONF")
        # The file may be on another machine. Unlike os.path, pathlib raises for names that are too long.
        known = {} if conf and not os.path.exists(conf) else self.environment  # noqa: PTH110
        return Client({**os.environ, **known}, self.cluster)

    def ask(self) -> JobState | None:
        """Ask Slurm for the job's state; return None if Slurm has forgotten the job, or reused its id.

        Raises:
            RefusedError, UnreachableError: if Slurm cannot be asked from here.
        """
        return self.own(self.client().query([self.job_id]))

    def own(self, states: Mapping[str, JobState]) -> JobState | None:
        """Find this job's state in Slurm's answer about several jobs."""
        state = states.get(self.job_id)
        return state if state is None or state.name in ("", self.name) else None


@dataclass(frozen=True)
class SlurmFacts:
    """Facts from Slurm that complete the rows of a run.

    `alive`: whether more rows may be written; None if unknown. `waits`: whether the job is in the queue. `ended`: the
    last row to assume if the job is over and wrote none.
    """

    alive: bool | None
    waits: bool = False
    message: str | None = None
    ended: dict[str, Any] | None = None


def kept_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that later calls of Slurm's commands for this run will need."""
    found = {name: environ.get(name) for name in KEPT}
    return {name: value for name, value in found.items() if isinstance(value, str) and "\0" not in value}


def this_process() -> dict[str, Any]:
    """Return the fields of SlurmJob that identify the submitting process."""
    return {"time": time.time(), "host": socket.gethostname(), "pid": os.getpid()}


def see(run: RunDir, rows: Rows) -> SlurmFacts | None:
    """Ask Slurm about a run without a last row; return None if its rows and lease suffice, or it was not queued.

    Raises:
        RunFolderError: if slurm.json does not belong to this user.
    """
    if rows.ended is not None:
        return _queued_again(run, rows)
    job = SlurmJob.read(run)
    if job is None:
        return None
    if _has_lease(run):
        return SlurmFacts(alive=True)
    try:
        state = _lately(run, job)
    except MusterError as error:
        return SlurmFacts(alive=None, message=str(error))
    return judge(job, state, begun=has_begun(job, rows), said=last_words(run, job), attempt=rows.attempt.get("attempt"))


def _queued_again(run: RunDir, rows: Rows) -> SlurmFacts | None:
    """Return the facts if Slurm or a lost node ended the last allocation, and the run is queued again; else None."""
    code = number((rows.ended or {}).get("code"))
    job = SlurmJob.read(run) if code in FROM_OUTSIDE and not run.stop.exists() else None
    if job is None:
        return None
    try:
        state = _lately(run, job)
    except MusterError:  # Slurm does not answer, so the last row counts
        return None
    if state is None or state.state != "PENDING":
        return None
    return judge(job, state, begun=True, said="", attempt=rows.attempt.get("attempt"))


def ask_together(runs: Iterable[RunDir]) -> None:
    """Ask about all waiting runs with one call of squeue per cluster, and remember the answers for `see`.

    Runs that cannot be asked about are skipped; `see` will report the reason.

    Raises:
        RunFolderError: if a slurm.json does not belong to this user.
    """
    groups: dict[tuple[Any, ...], list[tuple[RunDir, SlurmJob]]] = {}
    for run in runs:
        job = SlurmJob.read(run)
        if job is not None and not _has_lease(run) and read_rows(run).ended is None:
            groups.setdefault((job.cluster, *sorted(job.environment.items())), []).append((run, job))
    for group in groups.values():
        with contextlib.suppress(MusterError):
            states = group[0][1].client().query(job.job_id for _, job in group)
            _ANSWERS.update({run.path: (time.monotonic(), job.own(states)) for run, job in group})


# Answers by run folder, with their times. squeue's manual asks not to call it in loops, as `muster watch` would.
_ANSWERS: dict[Path, tuple[float, JobState | None]] = {}


def forget(run: RunDir) -> None:
    """Drop the remembered answer about a run, because its job has changed since."""
    _ANSWERS.pop(run.path, None)


def _lately(run: RunDir, job: SlurmJob) -> JobState | None:
    """Ask Slurm, or reuse an answer of the last ASK_S seconds."""
    now = time.monotonic()
    asked, state = _ANSWERS.get(run.path, (-math.inf, None))
    if now - asked >= ASK_S:
        state = job.ask()
        _ANSWERS[run.path] = (now, state)
    return state


def _has_lease(run: RunDir) -> bool:
    age_s = lease.age_s(run)
    return age_s is not None and age_s < lease.STALE_S


def has_begun(job: SlurmJob, rows: Rows) -> bool:
    """Return whether a supervisor has taken over from the submitting process."""
    who = (rows.submitted.get("host"), number(rows.submitted.get("pid")))
    return bool(rows.submitted) and who != (job.host, job.pid)


def judge(job: SlurmJob, state: JobState | None, *, begun: bool, said: str, attempt: int | None) -> SlurmFacts:
    """Interpret Slurm's answer about a run whose supervisor cannot be seen. Pure."""
    if state is None:
        return SlurmFacts(alive=False, message=f"Slurm does not know job {job.job_id} (any more)")
    if state.phase == "pending":
        again = "queued again: " if begun else ""
        return SlurmFacts(alive=True, waits=True, message=f"Slurm job {job.job_id}: {again}{waiting(state)}")
    if is_orphan(state):  # the job is not over: its remaining processes occupy the nodes until it is cancelled
        return SlurmFacts(alive=False, message=outcome(state).message)
    if state.phase == "over":
        result = outcome(state, said)
        return SlurmFacts(alive=False, message=result.message, ended=last_row(result, state.end_time, attempt))
    where = f"Slurm job {job.job_id} runs on {state.nodes}"
    if begun:
        return SlurmFacts(alive=None, message=f"{where}, but its supervisor has been silent for {lease.STALE_S:g} s")
    return SlurmFacts(alive=True, message=f"{where}; its supervisor is starting")


def last_row(result: JobOutcome, time_s: float | None, attempt: int | None) -> dict[str, Any]:
    """Return the `ended` row that the supervisor should have written."""
    return {
        "time": time.time() if time_s is None else time_s,
        "event": "ended",
        "attempt": attempt,
        "code": result.code,
        "class": exits.class_of(result.code),
        "message": result.message,
    }


def last_words(run: RunDir, job: SlurmJob) -> str:
    """Return the last lines of the batch script's output, by Slurm, the shell or the supervisor."""
    return "\n".join(tail_lines(target_of(output_path(run, job)), LAST_LINES))


def output_path(run: RunDir, job: SlurmJob) -> Path:
    """Return the file to which Slurm writes the output of the batch script."""
    return run.path / OUTPUT.replace("%j", job.job_id)


def since_submission(run: RunDir, job: SlurmJob) -> int:
    """Return the offset in the events of the job's `submitted` row; a resumed run has older rows before it."""
    offset, found, submitted = 0, 0, ["submitted", job.host, job.pid]
    if not run.events.exists():
        return 0
    with open_file(run.events) as file:
        while line := file.readline(LONGEST_LINE_BYTES):
            row = typed_line(line)
            found = offset if [row.get(key) for key in ("event", "host", "pid")] == submitted else found
            offset += len(line)
    return found
