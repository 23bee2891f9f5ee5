"""The run folder of a start without an agent: rank 0 makes it, or goes on in it, and tells the others.

It writes the few events that `muster status` and `why` read.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from torch.distributed import DistStoreError, Store  # type: ignore[attr-defined]

from muster.jobs.basics import exits
from muster.jobs.basics.errors import MusterError, NoCheckpointError
from muster.jobs.basics.files import append_line, write_json, write_secret
from muster.jobs.basics.reading import parse_json
from muster.jobs.checkpoint.choose import newest_good
from muster.jobs.hosts.placement import NodePlacement, Placement
from muster.jobs.hosts.ranks import RankEnv
from muster.jobs.runfolder.rundir import RunDir, find_run, new_run, runs_root
from muster.jobs.saving.resume import Resume
from muster.jobs.spec.load import LoadedJob
from muster.jobs.train.main import FAILED, Start

RUN_FOLDER_KEY: Final = "run-folder"
LAST_WORD_S: Final = 5.0
START_TICKS_FIELD: Final = 19  # of /proc/PID/stat, counted after the name


def share_start(store: Store, make: Callable[[], Start], env: RankEnv) -> Start:
    """Make the attempt's folder on rank 0 and tell all where it is and what it goes on from.

    Raises:
        RunFolderError, StorageError, NoCheckpointError: as `begin_attempt`; on every rank, for rank 0 tells that too.
    """
    if env.rank != 0:
        said = parse_json(store.get(RUN_FOLDER_KEY))  # waits as long as `connect` was allowed to
        store.set(f"{RUN_FOLDER_KEY}/read/{env.rank}", "")
        if "error" in said:
            error = MusterError(f"rank 0: {said['error']}")
            error.exit_code = said["code"]
            raise error
        return Start(RunDir(Path(said["path"])), said["attempt"], Resume.read(said["resume"]))
    try:
        start = make()
    except MusterError as error:
        store.set(RUN_FOLDER_KEY, json.dumps({"error": str(error), "code": error.exit_code}))
        readers = [f"{RUN_FOLDER_KEY}/read/{rank}" for rank in range(1, env.world_size)]
        with suppress(DistStoreError):  # the store ends with this process: let the others read first
            store.wait(readers, timedelta(seconds=LAST_WORD_S))
        raise
    resume = None if start.resume is None else asdict(start.resume)
    said = {"path": str(start.run.path), "attempt": start.attempt, "resume": resume}
    store.set(RUN_FOLDER_KEY, json.dumps(said))
    return start


def begin_attempt(loaded: LoadedJob, env: RankEnv, hosts: list[str], args: argparse.Namespace) -> Start:
    """Make a new run, or with `--resume` the next attempt of one, and write its first events.

    Raises:
        RunFolderError, StorageError: a folder cannot be found, made or written.
        NoCheckpointError: the run to go on with has no good checkpoint.
    """
    root = runs_root(args.runs)
    if args.resume is None:
        run, attempt, resume = new_run(root, loaded.job.name), 0, None
        write_secret(run.job, loaded.text)
    else:
        run = find_run(root, args.resume, unique=True)
        resume = choose(run)
        attempt = max(run.attempt_numbers(), default=-1) + 1
    folder = run.attempt(attempt)
    folder.make()
    placement = placement_of(env, hosts)
    write_json(folder.placement, placement.to_json())
    came_from = {"checkpoint": resume and resume.checkpoint, "step": resume.step if resume else 0}
    write_json(folder.resume, came_from)
    submitted = {
        "run_id": run.run_id,
        "name": loaded.job.name,
        "kind": loaded.job.kind,
        "nodes": len(placement.nodes),
        "world_size": env.world_size,
        "transport": "direct",
        "host": hosts[0],
        "pid": os.getpid(),
        "pid_start": pid_start(),
        "grace_s": loaded.job.grace_s,
    }
    # The run began with this process, not when its ranks had met.
    append_line(run.events, {"time": args.began, "event": "submitted", **submitted})
    where = {"world_size": env.world_size, "master_addr": env.master_addr, "master_port": env.master_port}
    event(run, "attempt", {"attempt": attempt, **where})
    if resume is not None:
        event(run, "resuming", {"attempt": attempt, **came_from})
    print(f"run {run.path}", flush=True)
    return Start(run, attempt, resume)


def choose(run: RunDir) -> Resume:
    """Choose the checkpoint to go on from.

    Raises:
        NoCheckpointError: there is none that is good.
        StorageError: the run folder cannot be read.
    """
    chosen = newest_good(run, say=lambda line: print(line, flush=True))
    if chosen is None:
        raise NoCheckpointError(f"{run.path}: no usable checkpoint; leave --resume out to begin anew")
    return Resume(chosen.folder.name, chosen.manifest.step, chosen.manifest.sha256)


def placement_of(env: RankEnv, hosts: list[str]) -> Placement:
    """Return where the ranks run: a node is a row of ranks on one host, and pretend nodes share theirs."""
    each = env.local_world_size
    even = env.nodes * each == env.world_size
    nodes: list[NodePlacement] = []
    for (_, host), group in groupby(range(env.world_size), key=lambda rank: (rank // each if even else 0, hosts[rank])):
        block = list(group)
        address = env.master_addr if not nodes else host
        nodes.append(NodePlacement(len(nodes), host, address, block[0], len(block)))
    return Placement(tuple(nodes), env.world_size, env.master_addr)


def record(start: Start, work: Callable[[], int]) -> int:
    """Do rank 0's work and write how it ended; without an agent nobody knows of the other ranks."""
    began = time.time()
    code, message = exits.DONE, "done"
    try:
        code = work()
        message = exits.class_of(code)
        return code
    except BaseException as error:
        code, message = _ending(error)
        raise
    finally:
        verdict = {"code": code, "class": exits.class_of(code), "message": message}
        row = {"attempt": start.attempt, "started": began, "ended": time.time(), **verdict}
        with suppress(MusterError):  # a full disk has been reported by what first met it
            append_line(start.run.attempts, {**row, "next_step": "", "first": None, "victims": []})
            event(start.run, "ended", {"attempt": start.attempt, **verdict})


def event(run: RunDir, name: str, values: dict[str, Any]) -> None:
    """Append one event."""
    append_line(run.events, {"time": time.time(), "event": name, **values})


def pid_start() -> int:
    """Return when this process began, in clock ticks after boot: with the pid it names one process for good."""
    after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return int(after_name[START_TICKS_FIELD])


def _ending(error: BaseException) -> tuple[int, str]:
    if isinstance(error, MusterError):
        return error.exit_code, str(error)
    if isinstance(error, KeyboardInterrupt):
        return exits.STOPPED, "stopped by the user"
    return FAILED, f"rank 0: {type(error).__name__}: {error}"
