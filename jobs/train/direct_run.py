"""The run folder of a start without an agent: rank 0 creates or resumes it, and sends its path to the others.

Rank 0 also writes the few events that `muster status` and `why` read.
"""

import argparse
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Final

from torch.distributed import DistStoreError, Store  # type: ignore[attr-defined]

from muster.jobs.basics.errors import MusterError, NoCheckpointError
from muster.jobs.basics.files import write_secret
from muster.jobs.basics.reading import parse_json
from muster.jobs.hosts.ranks import RankEnv
from muster.jobs.runfolder.direct import begin
from muster.jobs.runfolder.rundir import RunDir, find_run, new_run, runs_root
from muster.jobs.saving.resume import Resume, newest
from muster.jobs.spec.load import LoadedJob
from muster.jobs.train.main import TrainStart

RUN_FOLDER_KEY: Final = "run-folder"
ERROR_READ_S: Final = 5.0


def share_start(store: Store, make: Callable[[], TrainStart], env: RankEnv) -> TrainStart:
    """Create the attempt's folder on rank 0, and send its path and its checkpoint to all ranks.

    Raises:
        RunFolderError, StorageError, NoCheckpointError: on rank 0, as `begin_attempt` does.
        MusterError: on the other ranks, with rank 0's message and exit code.
    """
    if env.rank != 0:
        said = parse_json(store.get(RUN_FOLDER_KEY))  # waits as long as `connect` does
        store.set(f"{RUN_FOLDER_KEY}/read/{env.rank}", "")
        if "error" in said:
            error = MusterError(f"rank 0: {said['error']}")
            error.exit_code = said["code"]
            raise error
        return TrainStart(RunDir(Path(said["path"])), said["attempt"], Resume.read(said["resume"]))
    try:
        start = make()
    except MusterError as error:
        store.set(RUN_FOLDER_KEY, json.dumps({"error": str(error), "code": error.exit_code}))
        readers = [f"{RUN_FOLDER_KEY}/read/{rank}" for rank in range(1, env.world_size)]
        with suppress(DistStoreError):  # this process serves the store, so the others must read first
            store.wait(readers, timedelta(seconds=ERROR_READ_S))
        raise
    resume = None if start.resume is None else asdict(start.resume)
    said = {"path": str(start.run.path), "attempt": start.attempt, "resume": resume}
    store.set(RUN_FOLDER_KEY, json.dumps(said))
    return start


def begin_attempt(loaded: LoadedJob, env: RankEnv, hosts: list[str], args: argparse.Namespace) -> TrainStart:
    """Create a new run, or with `--resume` the next attempt of a run, and write its first events.

    Raises:
        RunFolderError, StorageError: if a folder cannot be found, created or written.
        NoCheckpointError: if the run to resume has no valid checkpoint.
    """
    root = runs_root(args.runs)
    if args.resume is None:
        run, resume = new_run(root, loaded.job.name), None
        write_secret(run.job, loaded.text)
    else:
        run = find_run(root, args.resume, unique=True)
        if (resume := newest(run)) is None:
            raise NoCheckpointError(f"{run.path}: no usable checkpoint; omit --resume to start a new run")
    job, came_from = loaded.job, None if resume is None else asdict(resume)
    # The run's start time is that of this process, not the time when the ranks met.
    facts = {"name": job.name, "kind": job.kind, "grace_s": job.grace_s}
    return TrainStart(run, begin(run, env, hosts, args.began, came_from, **facts), resume)
