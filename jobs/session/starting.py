"""Find the run folder of a session: the launcher created it, or rank 0 finds or creates it and shares its path.

MUSTER_RESUME=RUN     continue this run
torchrun restarts     continue the run that this torchrun began
Slurm requeues        continue the run that this Slurm job began
otherwise             create a new run
"""

import json
import os
import shlex
import socket
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from muster.jobs.basics.errors import MusterError
from muster.jobs.basics.files import read_lines, write_secret
from muster.jobs.runfolder.direct import begin
from muster.jobs.runfolder.rundir import RunDir, find_run, list_runs, new_run, runs_root
from muster.jobs.saving.resume import Resume, newest
from muster.jobs.session.place import TORCHRUN, RankPlace
from muster.jobs.session.together import OneRank

RESUME: Final = "MUSTER_RESUME"
SLURM_JOB: Final = "SLURM_JOB_ID"
SLURM_RESTARTS: Final = "SLURM_RESTART_COUNT"
TORCHRUN_ID: Final = "TORCHELASTIC_RUN_ID"
LAUNCH: Final = "launch"
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
    }
    came_from = _record(resume)
    return {
        "run": str(run.path),
        "attempt": begin(run, place.env, hosts, began, came_from, **facts),
        "resume": came_from,
    }


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
    again = place.env.attempt > 0 if place.launcher == TORCHRUN else os.environ.get(SLURM_RESTARTS, "0") != "0"
    if again and (launch := launch_of(place)):
        return next((run for run in reversed(list_runs(root)) if _recorded_launch(run) == launch), None)
    return None


def launch_of(place: RankPlace) -> str:
    """Return a name of the launch that stays the same after a restart by torchrun or Slurm; "" without either."""
    if place.launcher == TORCHRUN:
        given = os.environ.get(TORCHRUN_ID, "none")  # torchrun's default is "none", which identifies nothing
        return f"torchrun {given}" if given != "none" else f"torchrun {socket.gethostname()} {os.getppid()}"
    return f"slurm {job}" if (job := os.environ.get(SLURM_JOB)) else ""


def _recorded_launch(run: RunDir) -> str:
    first: Mapping[str, Any] = next(iter(read_lines(run.events)), {})
    return str(first.get(LAUNCH, ""))


def resume_line(run: RunDir) -> str:
    """Return the command that continues a run without a supervisor."""
    return f"{RESUME}={shlex.quote(str(run.path))} {shlex.join(sys.orig_argv)}"
