"""Entry point of a rank of a `train:` job: meet the other ranks, check that all have the same job and data, and train.

`run_rank` is called in a process forked from the warm one, with its rank in the environment. `direct.py` calls the same
functions if another launcher started the ranks.
"""

import gc
import hashlib
import json
import os
import platform
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from muster.ddp.malloc import keep_freed_memory
from muster.jobs.basics import exits
from muster.jobs.basics.errors import RefusedError, StartTimeoutError
from muster.jobs.basics.files import write_json
from muster.jobs.basics.sections import replaced, values
from muster.jobs.basics.words import counted
from muster.jobs.checkpoint.choose import newest_step
from muster.jobs.hosts import ranks
from muster.jobs.hosts.ranks import RankEnv
from muster.jobs.node import orders
from muster.jobs.node.orders import Orders
from muster.jobs.node.reports import Reporter
from muster.jobs.runfolder.rundir import RunDir
from muster.jobs.saving.memory import memory_run, with_copies
from muster.jobs.saving.replay import Replay, logged_losses
from muster.jobs.saving.resume import Resume
from muster.jobs.saving.saver import NotSaving, Saver, Target
from muster.jobs.saving.schedule import SaveSchedule, failures_so_far
from muster.jobs.spec.expand import split_text
from muster.jobs.spec.plain import plain_job
from muster.jobs.spec.recorded import records
from muster.jobs.spec.rules import told_division
from muster.jobs.tensors.snapshot import MemorySnapshot
from muster.jobs.train.data import Data, open_data, require_batch
from muster.jobs.train.data.loading import move
from muster.jobs.train.engine import Engine
from muster.jobs.train.identity import kept_of, meta_of
from muster.jobs.train.loop import NOT_SAVING, is_evaluated, train
from muster.jobs.train.memory.recorder import MemoryRecorder
from muster.jobs.train.metrics import Files
from muster.jobs.train.parallel.syncs import needs_group
from muster.jobs.train.profiling.marking import subject_of
from muster.jobs.train.profiling.recorder import NOT_PROFILING, NotProfiling, ProfileRecorder, prepare
from muster.jobs.train.regroup import Interrupted, LivingState, take_over
from muster.jobs.train.restoring import restore
from muster.jobs.train.trainer import Trainer, build_trainer
from muster.jobs.user import code
from muster.jobs.world.guard import guarded, make_own_folder, show_stacks
from muster.jobs.world.meeting import connect, meet
from muster.jobs.world.tensorboard import EventFiles
from muster.jobs.world.world import Peer, World, choose_device, open_world, require_equal, this_peer

if TYPE_CHECKING:
    from muster.jobs.spec.failover import CheckpointSettings
    from muster.jobs.spec.job import Job
    from muster.jobs.spec.train import TrainSettings


def run_rank(payload: Mapping[str, Any]) -> int:
    """Train as one rank; return its exit code.

    `payload` is {"job": the job serialized by `jobs/spec/plain.py`; "saving": whether to make checkpoints; "stays":
    whether to continue in the same process when other ranks are lost; "waits": to wait until it can join them;
    "resume":
    null or {"checkpoint": folder name, "step": n, "sha256": of its manifest}; "in_place": missing, or, if the attempt
    continues with the state of living ranks, {"checkpoint": the newest one, "joining": whether ranks have joined}}.
    """
    show_stacks()

    def work(reporter: Reporter) -> int:
        living = LivingState(orders.own, stays=bool(payload.get("stays")))
        order: Mapping[str, Any] | None = {"payload": payload}
        if payload.get("waits"):
            living.data = open_data(settings_of(read_job(payload)))
            order = living.next_order("ready to join", reporter, timeout_s=None)
        while order is not None:
            try:
                with living.interruptible():
                    return run_attempt(order["payload"], living, reporter)
            except Interrupted as interrupted:
                order = living.next_order(str(interrupted), reporter)
                if order is None:
                    raise interrupted.__cause__ or StartTimeoutError("no order came for the next attempt") from None
        return exits.INFRASTRUCTURE  # the rank parent has ended

    return guarded(work)


def read_job(payload: Mapping[str, Any]) -> "Job":
    """Return the job in the payload of a start message."""
    job = plain_job(payload["job"])
    return job if payload.get("saving") else replaced(job, checkpoint=None)


def run_attempt(payload: Mapping[str, Any], living: LivingState, reporter: Reporter) -> int:
    """Train in one attempt, with the state that `living` has from the last one, or another rank, or a checkpoint."""
    env, job = ranks.read(os.environ), read_job(payload)
    reporter.attempt = env.attempt
    in_place = payload.get("in_place")
    start = TrainStart(
        run_of(env),
        env.attempt,
        Resume.read(payload.get("resume")),
        None if in_place is None else InPlace(in_place["checkpoint"], joining=in_place["joining"]),
    )
    if start.resume is not None and living.trainer is not None:
        living.end()
        gc.collect()  # two trainers may need too much memory
    ended = train_in(start, job, join(job, env, reporter, living), reporter, living)
    living.end()
    return ended


def settings_of(job: "Job") -> "TrainSettings":
    """Return a job's `train:` section."""
    return cast("TrainSettings", job.settings)


def run_of(env: RankEnv) -> RunDir:
    """Return the run folder named in the environment.

    Raises:
        RefusedError: if the environment names no run folder.
    """
    if not env.run_dir:
        raise RefusedError(
            f"environment: {ranks.RUN_DIR} is not set; start ranks by muster or python -m muster.jobs.train"
        )
    return RunDir(Path(env.run_dir))


def join(job: "Job", env: RankEnv, reporter: Reporter, living: LivingState | None = None) -> World:
    """Meet the other ranks within the job's start timeout. `living`: the state that this rank has kept."""
    settings = settings_of(job)
    settings.check(env.world_size)
    make_deterministic(settings)
    reporter.arrived()
    if needs_group(settings.split(env.world_size)):
        if living is not None and living.stays:
            store = living.store.open(env, job.start_timeout_s, lambda: living.orders.has_come)
        else:
            store = connect(env, job.start_timeout_s)
        held = None if living is None else living.device_index
        world = join_group(store, job, env, meet(store, env, job.start_timeout_s, held))
        world = world if living is None else living.among(world)
    else:
        world = World(0, 1, None, choose_device(settings.device, 0, [this_peer()]))
    reporter.joined()
    return world


def join_group(store: Store, job: "Job", env: RankEnv, peers: Sequence[Peer]) -> World:
    """Choose this rank's device, and create the process group of the ranks that have met."""
    device = choose_device(settings_of(job).device, env.rank, peers)
    return open_world(store, env, device, job.start_timeout_s)


def make_deterministic(settings: "TrainSettings") -> None:
    """Make this process's kernels deterministic if the job asks for it."""
    if settings.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # required by cuBLAS; read when CUDA starts
        if "torch._inductor" in sys.modules:
            torch.use_deterministic_algorithms(True)
        else:  # that function would import the compiler, which takes two CPU seconds of every rank
            torch.set_deterministic_debug_mode("error")
            os.environ["TORCHINDUCTOR_DETERMINISTIC"] = "1"  # read if a model imports the compiler later


def open_same_data(job: "Job", world: World, opened: Data | None = None) -> Data:
    """Open the job's data, unless this rank has `opened` it before: a collective.

    Raises:
        RefusedError: if ranks read different jobs or different data, or a batch is larger than the data set.
    """
    settings = settings_of(job)
    spelt = {**values(settings), "data": None}  # paths may differ between nodes; contents are compared below
    digest = hashlib.sha256(json.dumps(spelt, sort_keys=True).encode()).hexdigest()
    require_equal(world, "the job file", digest, "give every rank the same file")
    data = opened or open_data(settings)
    require_batch(settings, data)
    require_equal(world, f"data {data.name}", data.fingerprint, "copy rank 0's files to those nodes")
    return data


def data_of(start: "TrainStart", job: "Job", world: World, living: LivingState) -> Data:
    """Return the job's data, which this rank may have open already. Errors as for `open_same_data`."""
    if living.data is None or (start.in_place is not None and start.in_place.joining):
        living.data = open_same_data(job, world, living.data)
    return living.data


@dataclass(frozen=True)
class InPlace:
    """An attempt that continues with the state of living ranks, some of which may have joined just now.

    `parent` is the newest checkpoint.
    """

    parent: str | None
    joining: bool


@dataclass(frozen=True)
class TrainStart:
    """An attempt: its run folder, its number, the checkpoint that it resumes from, and whether it continues in place.

    Without a checkpoint, the ranks that continue in place have the state.
    """

    run: RunDir
    attempt: int
    resume: Resume | None = None
    in_place: InPlace | None = None

    @property
    def world_before(self) -> int | None:
        """The number of ranks of the attempt before; None if there is none."""
        return self.run.attempt(self.attempt - 1).world_size if self.attempt else None


def train_in(start: TrainStart, job: "Job", world: World, reporter: Reporter, living: LivingState | None = None) -> int:
    """Train, with metrics and checkpoints in the run folder; return the rank's exit code.

    Raises:
        RunFolderError, StorageError: if the folder cannot be written.
        RefusedError, NoCheckpointError: if the checkpoint to load is missing or belongs to another job.
    """
    living = living or LivingState(Orders(), stays=False)
    keep_freed_memory()
    folder = start.run.attempt(start.attempt)
    make_own_folder(folder.path)
    writes_events = settings_of(job).tensorboard and world.rank == 0
    events = EventFiles(start.run.path, "tensorboard: true") if writes_events else None
    data = data_of(start, job, world, living)
    if world.rank == 0:
        print(describe(job, data, world, start.world_before), flush=True)
    prepare(settings_of(job).profile, cuda_graph=records(settings_of(job), world.device.type))
    memory = record_memory(start, job, world)
    trainer = build_trainer(settings_of(job), data, world)
    if world.rank == 0 and trainer.engine.notice:
        print(trainer.engine.notice, flush=True)
    if world.rank == 0 and settings_of(job).makes:
        write_json(folder.code, {"workdir": str(Path.cwd()), "files": code.files_of(Path.cwd())})
    living.connected()
    saving, replay, first, evaluates, living.regroups = NOT_SAVING, None, 0, False, False
    if start.in_place is not None and start.resume is None:
        source = take_over(living, trainer, reporter)
        first, evaluates = source.done, is_evaluated(trainer, source.done) and not source.evaluated
    if job.checkpoint is not None or start.resume is not None:
        kept = kept_of(trainer.settings, data, trainer.plan)
        if start.resume is not None:
            first, replay = load_state(start, start.resume, trainer, kept, reporter)
        unsaved = start.in_place is not None or (start.resume is not None and start.resume.memory)
        if job.checkpoint is not None and (first < trainer.steps or unsaved):
            saving = build_saver(start, first, job.checkpoint, trainer, kept, reporter, living)
    living.begin(trainer, first, reporter)
    of_run = (start.run.metrics, folder.timeline, events, start.run.epochs) if world.rank == 0 else (None,)
    files = Files(folder.metrics(world.rank), *of_run)
    profiling = build_profiling(start, job, trainer, first)
    memory.watch(trainer.engine)
    with memory:
        drained = train(
            trainer,
            files,
            reporter,
            attempt=start.attempt,
            first=first,
            saving=saving,
            replay=replay,
            profiling=profiling,
            living=living,
            evaluates=evaluates,
        )
    if not drained:
        return exits.DONE
    return exits.REQUEUE if job.checkpoint is not None else exits.STOPPED


class NotRecorded(nullcontext[None]):
    """Record nothing: the first attempt has recorded the memory, and the record would delay the first step in place."""

    def watch(self, engine: Engine) -> None:
        """Do nothing."""


def record_memory(start: TrainStart, job: "Job", world: World) -> MemoryRecorder | NotRecorded:
    """Start the record of this rank's memory, unless it continues in place."""
    if start.in_place is not None:
        return NotRecorded()
    path = start.run.attempt(start.attempt).memory(world.rank)
    return MemoryRecorder(path, world.device, facts_of(start, job, world))


def load_state(
    start: TrainStart, resume: Resume, trainer: Trainer, kept: Mapping[str, Any], reporter: Reporter
) -> tuple[int, Replay | None]:
    """Load a checkpoint into the trainer; return its step, and on rank 0 the audit of repeated steps."""
    moved = move(trainer.own_steps()[resume.step], trainer.world.device, trainer.dtype)
    place = (memory_run() if resume.memory else None) or start.run
    loaded = restore(place, resume, trainer.engine, trainer.world, kept, moved.shards)
    if trainer.world.rank != 0:
        return loaded.step, None
    reporter.loaded(step=loaded.step, seconds=loaded.seconds, checkpoint=loaded.checkpoint)
    left = "" if loaded.step < trainer.steps else ": no steps are left"
    for path in code.changed(loaded.code, code.files_of(Path.cwd())):
        print(f"{path} has changed since {loaded.checkpoint} was saved; training continues with the current version")
    step = f"step {loaded.step} of {trainer.steps}"
    source = f"{loaded.checkpoint} in the memory of the nodes" if resume.memory else loaded.checkpoint
    print(f"continues from {source}, {step}, read in {loaded.seconds:.2f} s{left}", flush=True)
    return loaded.step, Replay(logged_losses(start.run.metrics, after=loaded.step, attempt=start.attempt), reporter)


def facts_of(start: TrainStart, job: "Job", world: World) -> dict[str, Any]:
    """Return the columns that identify a rank's records."""
    return {
        "rank": world.rank,
        "world_size": world.size,
        "attempt": start.attempt,
        "host": socket.gethostname(),
        "job": job.name,
        "mode": settings_of(job).mode_name,
        "device": world.device.type,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def build_profiling(start: TrainStart, job: "Job", trainer: Trainer, first: int) -> NotProfiling:
    """Build the profiler of this rank's steps, if the job asks for one."""
    settings, world = trainer.settings, trainer.world
    if not settings.profile.on:
        return NOT_PROFILING
    facts = facts_of(start, job, world)
    folder = start.run.attempt(start.attempt).profile(world.rank)
    subject = subject_of(trainer.engine, settings)
    return ProfileRecorder(
        settings.profile, folder, trainer.clock, world.device, facts, subject=subject, done=first, steps=trainer.steps
    )


def build_saver(
    start: TrainStart,
    first: int,
    settings: "CheckpointSettings",
    trainer: Trainer,
    kept: Mapping[str, Any],
    reporter: Reporter,
    living: LivingState,
) -> NotSaving:
    """Build the saver of this rank's part of the trainer's state."""
    origin = start.resume.checkpoint if start.resume is not None else None
    parent = start.in_place.parent if start.in_place is not None and origin is None else origin
    began_from = None if start.resume is not None and start.resume.memory else origin  # must be on disk
    own_code = living.own_code if trainer.world.rank == 0 else {}

    def describe(done: int, parent: str | None, losses: Sequence[tuple[int, float]]) -> Mapping[str, Any]:
        return meta_of(
            trainer.settings,
            trainer.plan,
            kept,
            done=done,
            steps=trainer.steps,
            world_size=trainer.world.size,
            parent=parent,
            losses=losses,
            aliases=trainer.engine.model.whole.aliases,
            code=own_code,
        )

    elapsed_s, failures = failures_so_far(start.run)
    schedule = SaveSchedule(settings, first, elapsed_s=elapsed_s, failures=failures)
    saved = None if start.in_place is None else newest_step(start.run) if trainer.world.rank == 0 else 0
    target = Target(start.run, start.attempt, began_from, first, parent, saved, living.begun)
    room = partial(MemorySnapshot, device=trainer.world.device)
    held, world = trainer.engine.held_state, trainer.world
    return with_copies(Saver(target, settings, held, room, world, schedule, describe, reporter), memory_run())


def describe(job: "Job", data: Data, world: World, before: int | None = None) -> str:
    """Describe a training in one line: model, data, mode, precision and ranks.

    A second line tells how `before`, the number of ranks of the attempt before, divided batches otherwise.
    """
    settings = settings_of(job)
    over = "" if settings.is_pipeline else f" over {settings.virtual_world_size(world.size)} virtual ranks"
    exact = f", exact{over}" if settings.exact else ""
    mode = split_text(settings)
    numbers = "" if settings.precision == "fp32" else f", {settings.precision}"
    threads = "" if world.device.type == "cuda" else f" with {counted(torch.get_num_threads(), 'thread')} per rank"
    told = "" if before is None else told_division(settings, before, world.size)
    return (
        f"{settings.model.title} on {data.name}: {data.train_samples} samples, batch {settings.batch_size}, "
        f"mode {mode}{exact}{numbers}, {counted(world.size, 'rank')} on {world.device.type}{threads}"
        + (f"\n{told}" if told else "")
    )
