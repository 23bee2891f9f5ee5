"""A model split over tensor ranks trains, clips, is saved and is read as one process has it."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ddp.norms import plain_norm
from jobs.checkpoint import commit
from jobs.checkpoint.manifest import read_manifest
from jobs.checkpoint.read import Reader
from jobs.checkpoint.shard import write_shard
from jobs.rundir import RunDir
from jobs.train import optim
from jobs.train.clock import clock_for
from jobs.train.engine import DataParallelEngine
from jobs.train.loading import MicroInput, ShardInput
from jobs.train.models import build_model
from jobs.train.numerics import numerics_of
from jobs.train.replica import Replica
from jobs.train.shards import Forms
from jobs.train.tensor_replica import TensorReplica, split_layers
from jobs.train.world import World
from jobs.train_settings import TrainSettings

pytestmark = pytest.mark.ranks

VOCABULARY, CONTEXT, BATCH = 12, 6, 4
MODEL = {"d_model": 8, "d_ff": 16, "layers": 2, "heads": 4, "context": CONTEXT, "bias": True, "norm": "layer"}
ADAMW = {"name": "adamw", "lr": 1e-2, "weight_decay": 0.1}
JOB = {"model": MODEL, "data": "synthetic", "batch_size": BATCH, "optimizer": ADAMW, "mode": "single"}
JOBS: list[dict[str, Any]] = [
    {**JOB, "precision": "fp64", "clip_norm": 0.3, "grad_accumulation": 2},
    {**JOB, "precision": "fp64", "clip_norm": 0.1, "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9}},
]
WITHIN = 1e-12


def engine_of(job: dict[str, Any], world: World) -> DataParallelEngine:
    settings = TrainSettings.model_validate(job)
    numerics = numerics_of(settings, world.device)
    model = numerics.place(build_model(settings.model, vocabulary=VOCABULARY, seed=settings.seed))
    forms, clock = Forms(model), clock_for(world.device)
    replica = split_layers(model, world, clock, settings) if world.size > 1 else Replica(model, world, clock)
    return DataParallelEngine(replica, replica.build_optimizer(numerics, settings), world, settings, numerics, forms)


def train(engine: DataParallelEngine, step: int) -> float:
    tokens = torch.randint(VOCABULARY, (2, BATCH, CONTEXT), generator=torch.Generator().manual_seed(step))
    micros = tuple(MicroInput(tokens[0, at : at + 2], tokens[1, at : at + 2], 2, 0.5) for at in (0, 2))
    (loss,) = engine.train_step(step, (ShardInput(0, micros),))
    return loss.item()


def far(found: dict[str, Tensor], wanted: dict[str, Tensor], what: str) -> list[str]:
    if found.keys() != wanted.keys():
        return [f"{what}: {sorted(found)} where {sorted(wanted)} were wanted"]
    return [
        f"{what}: {name} is off"
        for name, each in wanted.items()
        if each.shape != found[name].shape or float((each - found[name]).abs().max()) > WITHIN
    ]


def compare(engine: DataParallelEngine, alone: DataParallelEngine, step: int) -> list[str]:
    losses = [train(each, step) for each in (engine, alone)]
    tokens = torch.randint(VOCABULARY, (3, CONTEXT), generator=torch.Generator().manual_seed(99))
    return [
        *([] if abs(losses[0] - losses[1]) <= WITHIN else [f"step {step}: losses {losses}"]),
        *far(engine.full_gradients(), alone.full_gradients(), f"step {step}: gradients"),
        *far(engine.full_state(), alone.full_state(), f"step {step}: state"),
        *far({"": engine.predict(tokens)}, {"": alone.predict(tokens)}, f"step {step}: logits"),
    ]


def save(engine: DataParallelEngine, world: World, folder: str, step: int) -> None:
    run = RunDir(Path(folder))
    if world.rank == 0:
        run.attempt(0).path.mkdir(parents=True, exist_ok=True)
        commit.begin(run, step, 0)
    dist.barrier(group=world.group)
    into = commit.begin(run, step, 0)
    pieces = [(part.piece, part.tensor.contiguous().numpy().tobytes()) for part in engine.held_state()]
    write_shard(into, world.rank, world.size, pieces, meta={"step": step, "losses": [[step, 1.5]]})
    dist.barrier(group=world.group)
    if world.rank == 0:
        commit.commit(run, into, world.size)
    dist.barrier(group=world.group)


def read(engine: DataParallelEngine, folder: str, step: int) -> None:
    saved = RunDir(Path(folder)).checkpoint(step, 0)
    with Reader(saved, read_manifest(saved)) as reader:
        stored = {name: reader.piece(name) for name in reader.names()}
        for part in engine.wanted_state(stored):
            buffer = bytearray(part.piece.nbytes)
            reader.read_into(part.piece, buffer)
            part.tensor.copy_(torch.frombuffer(buffer, dtype=part.tensor.dtype).view(part.tensor.shape))
    engine.refresh()


def wrong(world: World, folder: str) -> list[str]:
    problems = []
    one = World(0, 1, None, world.device)
    for number, job in enumerate(JOBS):
        engine, alone = engine_of(job, world), engine_of(job, one)
        for step in range(3):
            problems += [f"job {number}: {each}" for each in compare(engine, alone, step)]
        save(engine, world, f"{folder}/{number}", 3)
        others = engine_of(job, world), engine_of(job, one)
        for each in others:
            read(each, f"{folder}/{number}", 3)
        problems += [f"job {number} resumed: {each}" for each in compare(*others, 3)]
        train(alone, 3)
        problems += far(others[0].full_state(), alone.full_state(), f"job {number} resumed")
    return problems


def reported(world: World) -> dict[str, bool]:
    """Return which mistakes a step shows."""
    found = {}
    one = World(0, 1, None, world.device)
    for name, mistake in MISTAKES.items():
        with mistake():
            engine = engine_of(JOBS[1], world)
            found[name] = bool(compare(engine, engine_of(JOBS[1], one), 0))
    return found


MISTAKES: dict[str, Callable[[], Any]] = {
    "none": nullcontext,
    "whole gradients counted by every rank": lambda: mock.patch.object(TensorReplica, "counted", return_value=None),
    "each rank its own norm": lambda: mock.patch.object(optim, "plain_norm", alone_norm),
}


def alone_norm(tensors: list[Tensor], group: Any, *, reduce: bool) -> Tensor:
    return plain_norm(tensors, None, reduce=False)


def test_a_norm_that_counts_otherwise_is_seen(on_ranks):
    for found in on_ranks(2, reported):
        assert found == {name: name != "none" for name in MISTAKES}


@pytest.mark.parametrize("ranks", [2, 4])
def test_split_layers_train_and_resume_as_one_process(on_ranks, tmp_path, ranks):
    assert on_ranks(ranks, wrong, folder=str(tmp_path)) == [[]] * ranks
