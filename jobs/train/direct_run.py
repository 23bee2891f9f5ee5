"""The run folder of a start without an agent: rank 0 makes it, or goes on in it, and tells the others.

It writes the few events that `muster status` and `why` read.
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
from muster.jobs.train.main import Start

RUN_FOLDER_KEY: Final = "run-folder"
LAST_WORD_S: Final = 5.0


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
        run, resume = new_run(root, loaded.job.name), None
        write_secret(run.job, loaded.text)
    else:
        run = find_run(root, args.resume, unique=True)
        if (resume := newest(run)) is None:
            raise NoCheckpointError(f"{run.path}: no usable checkpoint; leave --resume out to begin anew")
    job, came_from = loaded.job, None if resume is None else asdict(resume)
    # The run began with this process, not when its ranks had met.
    facts = {"name": job.name, "kind": job.kind, "grace_s": job.grace_s}
    return Start(run, begin(run, env, hosts, args.began, came_from, **facts), resume)
