"""The run folder of a session: the launcher's, or one that rank 0 makes and names to the others.

MUSTER_RESUME=RUN     continue this run
torchrun restarts     continue the run of its first start, which its store remembers
Slurm requeues        continue the run that has the same job number
else                  a new run
"""

import json
import os
import shlex
import socket
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from muster.jobs.basics.errors import MusterError
from muster.jobs.basics.files import read_lines, write_secret
from muster.jobs.runfolder.direct import Beginning
from muster.jobs.runfolder.rundir import RunDir, find_run, list_runs, new_run, runs_root
from muster.jobs.saving.resume import Resume, newest
from muster.jobs.session.place import TORCHRUN, Place
from muster.jobs.session.together import Alone

RESUME: Final = "MUSTER_RESUME"
SLURM_JOB: Final = "SLURM_JOB_ID"
SLURM_RESTARTS: Final = "SLURM_RESTART_COUNT"
STORE_KEY: Final = "muster/run"
STORE_S: Final = 30.0
HOST_BYTES: Final = 64
GRACE_S: Final = 5.0  # between SIGTERM and SIGKILL of muster stop


@dataclass(frozen=True)
class Start:
    """Where an attempt writes, and the checkpoint it begins from. `direct`: no supervisor writes its events."""

    run: RunDir
    attempt: int
    resume: Resume | None
    direct: bool


def start(place: Place, ranks: Alone, runs: str | None, began: float) -> Start:
    """Find or make the run folder: a collective, unless the launcher has said everything.

    Raises:
        RunFolderError, StorageError: the folder cannot be found, made or written; on every rank.
    """
    if place.watched:
        assert place.run is not None
        return Start(place.run, place.attempt, place.resume, direct=False)
    told: Any = None
    hosts = host_names(ranks)
    if ranks.rank == 0:
        try:
            told = _begin(place, hosts, runs, began)
        except MusterError as error:
            told = error
    said = ranks.share(told)
    resume = Resume.read(said["resume"])
    return Start(RunDir(Path(said["run"])), said["attempt"], resume, direct=place.run is None)


def _begin(place: Place, hosts: list[str], runs: str | None, began: float) -> Mapping[str, Any]:
    """Begin an attempt on rank 0."""
    run, attempt, resume = place.run, place.attempt, None
    if run is not None:  # of an agent that does not watch this process: torchrun, say, is between them
        return {"run": str(run.path), "attempt": attempt, "resume": _record(newest(run))}
    root = runs_root(runs)
    run = earlier_run(place, root)
    if run is None:
        run, attempt = new_run(root, place.name), 0
        command = [sys.executable, *sys.orig_argv[1:]]
        write_secret(run.job, json.dumps({"name": place.name, "command": command}) + "\n")  # JSON is YAML, too
    else:
        resume, attempt = newest(run), max(run.attempt_numbers(), default=-1) + 1
    _remember(place, run)
    checkpoint, step = (resume.checkpoint, resume.step) if resume else (None, 0)
    facts = {
        "name": place.name,
        "kind": "command",
        "grace_s": GRACE_S,
        "continue_with": resume_line(run),
        SLURM_JOB: os.environ.get(SLURM_JOB, ""),
    }
    Beginning(run, attempt, place.env, hosts, checkpoint, step).write(began, **facts)
    print(f"run {run.path}", flush=True)
    return {"run": str(run.path), "attempt": attempt, "resume": _record(resume)}


def host_names(ranks: Alone) -> list[str]:
    """Return the host of every rank: a collective."""
    name = socket.gethostname().encode()[:HOST_BYTES].ljust(HOST_BYTES, b"\0")
    return [
        bytes(map(int, each)).rstrip(b"\0").decode(errors="replace") for each in ranks.exchange([*map(float, name)])
    ]


def _record(resume: Resume | None) -> Mapping[str, Any] | None:
    return None if resume is None else asdict(resume)


def earlier_run(place: Place, root: Path) -> RunDir | None:
    """Return the run that this process continues; None: it begins a new one.

    Raises:
        NotFoundError: MUSTER_RESUME names no run.
    """
    if given := os.environ.get(RESUME):
        return find_run(root, given, unique=True)
    if place.launcher == TORCHRUN and place.env.attempt > 0 and place.env.agent_store:
        store = _store(place)
        return RunDir(Path(store.get(STORE_KEY).decode())) if store.check([STORE_KEY]) else None
    if job := os.environ.get(SLURM_RESTARTS, "0") != "0" and os.environ.get(SLURM_JOB):
        return next((run for run in reversed(list_runs(root)) if _slurm_job(run) == job), None)
    return None


def _slurm_job(run: RunDir) -> str:
    first: Mapping[str, Any] = next(iter(read_lines(run.events)), {})
    return str(first.get(SLURM_JOB, ""))


def _remember(place: Place, run: RunDir) -> None:
    """Have torchrun's own store, which outlives its restarts, remember the run."""
    if place.launcher == TORCHRUN and place.env.agent_store:
        _store(place).set(STORE_KEY, str(run.path))


def _store(place: Place) -> Any:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore(place.env.master_addr, place.env.master_port, None, False, timedelta(seconds=STORE_S))


def resume_line(run: RunDir) -> str:
    """Spell the command that continues a run of its own."""
    return f"{RESUME}={shlex.quote(str(run.path))} {shlex.join(sys.orig_argv)}"
