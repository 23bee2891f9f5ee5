"""Find the run folder of a session: the launcher created it, or rank 0 finds or creates it and shares its path.

MUSTER_RESUME=RUN     continue this run
torchrun restarts     continue the run that this program began in this torchrun
Slurm requeues        continue the run that this program began in this Slurm job
otherwise             create a new run

A job may run several programs, one after the other or side by side. A program is identified by its folder, its command
line and the name of its session.
"""

import fcntl
import hashlib
import json
import os
import shlex
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from muster.jobs.basics.errors import MusterError, RefusedError
from muster.jobs.basics.files import read_lines, write_secret
from muster.jobs.hosts.ranks import number
from muster.jobs.machine import procfs
from muster.jobs.runfolder.direct import begin
from muster.jobs.runfolder.rundir import RunDir, find_run, list_runs, new_run, runs_root
from muster.jobs.saving.resume import Resume, newest
from muster.jobs.session.place import TORCHRUN, RankPlace
from muster.jobs.session.together import OneRank

RESUME: Final = "MUSTER_RESUME"
SLURM_JOB: Final = "SLURM_JOB_ID"
SLURM_RESTARTS: Final = "SLURM_RESTART_COUNT"
TORCHRUN_ID: Final = "TORCHELASTIC_RUN_ID"
SLURM_NAME: Final = "SLURM_JOB_NAME"
INTERACTIVE: Final = "interactive"  # salloc's name of a job without a name
LAUNCH, PROGRAM, START = "launch", "program", "start"  # fields of the event `submitted`
FIRST: Final = "000000.000000"
HOST_BYTES: Final = 64
GRACE_S: Final = 5.0  # time between SIGTERM and SIGKILL in muster stop


@dataclass(frozen=True)
class SessionStart:
    """An attempt's run folder, number, and checkpoint to resume from. `direct`: the run has no supervisor."""

    run: RunDir
    attempt: int
    resume: Resume | None
    direct: bool


def start(place: RankPlace, ranks: OneRank, runs: str | None, began: float) -> SessionStart:
    """Find or create the run folder: a collective, unless an agent watches the ranks.

    Raises:
        RunFolderError, StorageError: on every rank, if the folder cannot be found, created or written.
    """
    if place.watched:
        assert place.run is not None
        if ranks.rank == 0 and RESUME in os.environ:
            print(f"muster: {RESUME} has no effect under muster run; use muster resume", file=sys.stderr, flush=True)
        return SessionStart(place.run, place.attempt, place.resume, direct=False)
    told: Any = None
    hosts = host_names(ranks)
    if ranks.rank == 0:
        try:
            told = _begin(place, hosts, runs, began)
        except MusterError as error:
            told = error
    said = ranks.share(told)
    resume = Resume.read(said["resume"])
    return SessionStart(RunDir(Path(said["run"])), said["attempt"], resume, direct=place.run is None)


def _begin(place: RankPlace, hosts: list[str], runs: str | None, began: float) -> Mapping[str, Any]:
    """Begin an attempt on rank 0."""
    if place.run is not None:  # an agent started the launcher (such as torchrun), and does not watch its ranks
        return {"run": str(place.run.path), "attempt": place.attempt, "resume": _record(newest(place.run))}
    root = runs_root(runs)
    with _locked(root) if launch_of(place) else nullcontext():
        run, resume = earlier_run(place, root), None
        if run is None:
            run = new_run(root, place.name)
            command = [sys.executable, *sys.orig_argv[1:]]
            write_secret(run.job, json.dumps({"name": place.name, "command": command}) + "\n")  # JSON is valid YAML
        else:
            resume = newest(run)
        facts = {
            "name": place.name,
            "kind": "command",
            "grace_s": GRACE_S,
            "continue_with": resume_line(run),
            LAUNCH: launch_of(place),
            PROGRAM: program_of(place),
            START: start_of(place),
        }
        came_from = _record(resume)
        attempt = begin(run, place.env, hosts, began, came_from, **facts)
    return {"run": str(run.path), "attempt": attempt, "resume": came_from}


@contextmanager
def _locked(root: Path) -> Iterator[None]:
    """Let one program at a time look for its run. Without locks on the storage, equal programs may create one each."""
    descriptor = None
    with suppress(OSError):  # creating the run reports a problem of the storage
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(root / ".sessions.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def host_names(ranks: OneRank) -> list[str]:
    """Return the host of every rank: a collective."""
    name = socket.gethostname().encode()[:HOST_BYTES].ljust(HOST_BYTES, b"\0")
    return [
        bytes(map(int, each)).rstrip(b"\0").decode(errors="replace") for each in ranks.exchange([*map(float, name)])
    ]


def _record(resume: Resume | None) -> Mapping[str, Any] | None:
    return None if resume is None else asdict(resume)


def earlier_run(place: RankPlace, root: Path) -> RunDir | None:
    """Return the run that this process continues; None if it begins a new one.

    Raises:
        NotFoundError: if the run named by MUSTER_RESUME does not exist.
    """
    if given := os.environ.get(RESUME):
        return find_run(root, given, unique=True)
    if not (launch := launch_of(place)):
        return None
    rows = [(run, [*read_lines(run.events)]) for run in list_runs(root) if _first_row(run).get(LAUNCH) == launch]
    equal = [each for each in rows if _newest_start(each[1]).get(PROGRAM, program_of(place)) == program_of(place)]
    start = start_of(place)
    if not equal:
        if rows and start != FIRST:
            begun = ", ".join(run.run_id for run, _ in rows)
            print(
                f"muster: {launch} has begun {begun}, but from another folder or with another command line or name, so "
                f"a new run begins; {RESUME}=RUN continues one of them",
                file=sys.stderr,
                flush=True,
            )
        return None
    run, events = equal[-1]
    if start > (before := str(_newest_start(events).get(START, FIRST))):
        return run
    if start == before and _is_taken(events, launch):
        raise RefusedError(
            f"session: {launch} has begun {run.run_id} with the same folder and command line, so after a restart "
            'neither program would know its run; give each its own name: muster.session("NAME")'
        )
    return None


def launch_of(place: RankPlace) -> str:
    """Return a name of the launch that stays the same after a restart by Slurm or torchrun; "" without either."""
    if job := os.environ.get(SLURM_JOB):
        return f"slurm {job}"
    if place.launcher != TORCHRUN:
        return ""
    given = os.environ.get(TORCHRUN_ID, "none")  # torchrun's default is "none", which identifies nothing
    return f"torchrun {given}" if given != "none" else f"torchrun {socket.gethostname()} {os.getppid()}"


def program_of(place: RankPlace) -> str:
    """Return a digest of the folder, the command line and the name, which tell the programs of a launch apart."""
    return hashlib.sha256(json.dumps([str(Path.cwd()), sys.orig_argv, place.name]).encode()).hexdigest()[:16]


def start_of(place: RankPlace) -> str:
    """Return the number of restarts by Slurm and by torchrun, as text that sorts by them."""
    attempt = place.env.attempt if place.launcher == TORCHRUN else 0
    restarts = number({SLURM_RESTARTS: os.environ.get(SLURM_RESTARTS) or "0"}, SLURM_RESTARTS)
    return f"{restarts:06}.{attempt:06}"


def _first_row(run: RunDir) -> Mapping[str, Any]:
    return next(iter(read_lines(run.events)), {})


def _newest_start(events: list[dict[str, Any]]) -> Mapping[str, Any]:
    return next((row for row in reversed(events) if row.get("event") == "submitted"), {})


def _is_taken(events: list[dict[str, Any]], launch: str) -> bool:
    """Return whether an equal program of the same start still runs or is done. After a failure, another may begin."""
    if events[-1].get("event") == "ended":
        interactive = os.environ.get(SLURM_NAME) == INTERACTIVE or (sys.stdin is not None and sys.stdin.isatty())
        return events[-1].get("code") == 0 and launch.startswith("slurm") and not interactive
    row = _newest_start(events)
    if row.get("host") != socket.gethostname():
        return launch.startswith("slurm")
    return isinstance(row.get("pid"), int) and procfs.start_ticks(row["pid"]) == row.get("pid_start")


def resume_line(run: RunDir) -> str:
    """Return the command that continues a run without a supervisor."""
    return f"{RESUME}={shlex.quote(str(run.path))} {shlex.join(sys.orig_argv)}"
