"""What a rank of a `train:` job runs: meet the others, check that all read the same, train, say how it ended.

`run_rank` is called in a process forked from the warm one; its rank stands in the environment. `direct.py` makes the
same calls when somebody else started the ranks.
"""

import errno
import hashlib
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from jobs import exits, ranks
from jobs.errors import MusterError, RefusedError, StartTimeoutError
from jobs.files import folder_error
from jobs.ranks import RankEnv
from jobs.reports import Reporter
from jobs.rundir import RunDir
from jobs.spec import Job, TrainSettings
from jobs.train.data import Data, open_data
from jobs.train.failures import is_lost_connection
from jobs.train.loop import build_trainer, train
from jobs.train.meeting import connect, meet
from jobs.train.metrics import Files
from jobs.train.modes import needs_group
from jobs.train.world import Peer, World, choose_device, open_world, require_equal, this_peer
from jobs.words import counted

FAILED: Final = 1
DISK_ERRORS: Final = (errno.ENOSPC, errno.EDQUOT, errno.EIO)


def run_rank(payload: Mapping[str, Any]) -> int:
    """Train as one rank; return its exit code. `payload` is {"job": the job as JSON, unset keys left out}."""

    def work(reporter: Reporter) -> int:
        env = ranks.read(os.environ)
        job = job_of(payload["job"])
        train_in(run_of(env), job, join(job, env, reporter), reporter, attempt=env.attempt)
        return 0

    return guarded(work)


def guarded(work: Callable[[Reporter], int]) -> int:
    """Run a rank's work; turn its end into a report, a message on standard error and an exit code."""
    reporter = Reporter(os.environ)
    try:
        code = work(reporter)
    except MusterError as error:
        reporter.failed(error, peer=isinstance(error, StartTimeoutError))
        complain(f"muster: {error}")
        return error.exit_code
    except Exception as error:
        full = isinstance(error, OSError) and error.errno in DISK_ERRORS  # a print met it before a row did
        reporter.failed(error, peer=is_lost_connection(error))
        complain(traceback.format_exc().rstrip("\n"))
        return exits.STORAGE if full else FAILED
    if dist.is_initialized():  # not after a failure: it may wait for a dead peer, and the process ends without it
        dist.destroy_process_group()
    return code


def complain(text: str) -> None:
    """Print on standard error, where that is possible."""
    with suppress(OSError):  # it may lie on the very disk whose being full is to be told; the exit code still is
        print(text, file=sys.stderr, flush=True)


def job_of(dumped: Mapping[str, Any]) -> Job:
    """Read a job back from the JSON of `Job.model_dump(exclude_unset=True)`."""
    return Job.model_validate({**dumped, "settings": TrainSettings.model_validate(dumped["settings"])})


def settings_of(job: Job) -> TrainSettings:
    """Return the section of a `train:` job."""
    assert isinstance(job.settings, TrainSettings)
    return job.settings


def run_of(env: RankEnv) -> RunDir:
    """Return the run folder that the environment names.

    Raises:
        RefusedError: it names none.
    """
    if not env.run_dir:
        raise RefusedError(
            f"environment: {ranks.RUN_DIR} is not set; start this through muster or python -m jobs.train"
        )
    return RunDir(Path(env.run_dir))


def join(job: Job, env: RankEnv, reporter: Reporter) -> World:
    """Meet the other ranks within the job's start time-out."""
    settings = settings_of(job)
    settings.check(env.world_size)
    make_deterministic(settings)
    reporter.arrived()
    if needs_group(settings.split(env.world_size).sync, env.world_size):
        store = connect(env, job.start_timeout_s)
        world = join_group(store, job, env, meet(store, env, job.start_timeout_s))
    else:
        world = World(0, 1, None, choose_device(settings.device, 0, [this_peer()]))
    reporter.joined()
    return world


def join_group(store: Store, job: Job, env: RankEnv, peers: Sequence[Peer]) -> World:
    """Make the process group of ranks that have met, on the devices that they see."""
    device = choose_device(settings_of(job).device, env.rank, peers)
    return open_world(store, env, device, job.start_timeout_s)


def make_deterministic(settings: TrainSettings) -> None:
    """Make this process's kernels deterministic when the job asks for it."""
    if settings.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts; the library asks for it
        torch.use_deterministic_algorithms(True)


def open_same_data(job: Job, world: World) -> Data:
    """Open the job's data.

    Raises:
        RefusedError: another rank reads another job or other data.
    """
    settings = settings_of(job)
    spelt = settings.model_dump_json(exclude={"data"})  # a text may lie elsewhere on another node
    require_equal(world, "the job file", hashlib.sha256(spelt.encode()).hexdigest(), "give every rank the same one")
    data = open_data(settings)
    require_equal(world, f"data {data.name}", data.fingerprint, "copy rank 0's files to those nodes")
    return data


def train_in(run: RunDir, job: Job, world: World, reporter: Reporter, *, attempt: int) -> None:
    """Train, with metrics going into the run folder.

    Raises:
        RunFolderError, StorageError: the folder cannot be written.
    """
    folder = run.attempt(attempt)
    try:
        folder.path.mkdir(parents=True, exist_ok=True)  # a node without the shared folder keeps its own part
    except OSError as error:
        raise folder_error(folder.path, error) from error
    data = open_same_data(job, world)
    if world.rank == 0:
        print(describe(job, data, world), flush=True)
    trainer = build_trainer(settings_of(job), data, world)
    train(
        trainer, Files(folder.metrics(world.rank), run.metrics if world.rank == 0 else None), reporter, attempt=attempt
    )


def describe(job: Job, data: Data, world: World) -> str:
    """Say in one line what is trained, how and on what."""
    settings = settings_of(job)
    exact = f", exact over {settings.virtual_world_size(world.size)} virtual ranks" if settings.exact else ""
    mode = settings.mode if settings.parallel is None else f"data {settings.parallel.data} by {settings.parallel.sync}"
    threads = "" if world.device.type == "cuda" else f" with {counted(torch.get_num_threads(), 'thread')} a rank"
    return (
        f"{settings.model.name or 'gpt'} on {data.name}: {data.train_samples} samples, batch {settings.batch_size}, "
        f"mode {mode}{exact}, {counted(world.size, 'rank')} on {world.device.type}{threads}"
    )
