"""A job with `layerwise: true` trains as zero3 does, in every precision, and its checkpoint has the same tensors."""

from typing import Any

import pytest
import torch

from muster.ddp.checks import gather_json
from muster.jobs.models.shapes import POOL, VGG_SHAPES, VggShape
from muster.jobs.spec.train import TrainSettings
from muster.jobs.train.data import open_data
from muster.jobs.train.data.loading import move
from muster.jobs.train.parallel.sharded import LayerwiseReplica
from muster.jobs.train.trainer import Trainer, build_trainer
from muster.jobs.world.world import World

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

TINY_VGG = VggShape("vgg-tiny", (8, POOL, 8, POOL, 16, POOL, 16, POOL, 16, POOL))
SGD = {"name": "sgd", "lr": 0.05, "momentum": 0.9}
VGG = {"model": "vgg-tiny", "data": "digits", "batch_size": 24, "clip_norm": 1.0, "optimizer": SGD}
GPT = {
    "model": {"d_model": 12, "d_ff": 20, "layers": 2, "heads": 2, "context": 8, "tied": False, "dropout": 0.1},
    "data": "python-source",
    "batch_size": 12,
    "optimizer": {"name": "adamw", "lr": 0.01},
}
# Not by AdamW: where a gradient is nothing but rounding, its step is as large as anywhere.
JOBS = {"vgg": VGG, "gpt": GPT, "gpt by sgd": {**GPT, "optimizer": SGD}}
STEPS = 3


def trained(world: World, job: dict[str, Any]) -> tuple[Trainer, list[float], set[str]]:
    settings = TrainSettings.model_validate({**job, "mode": "zero3", "grad_accumulation": 2, "evaluate": False})
    trainer = build_trainer(settings, open_data(settings), world)
    steps, losses = trainer.own_steps(), []
    for step in range(STEPS):
        trainer.clock.start()
        (loss,) = trainer.engine.train_step(step, move(steps[step], world.device, trainer.dtype).shards)
        trainer.clock.stop()
        losses.append(float(loss))
    names = [part.piece.name for part in trainer.engine.held_state()]
    of_all = gather_json(names, world.group, world.device)  # they are cut in other places
    return trainer, losses, {name for each in of_all.values() for name in each}


def wrong(world: World, runs: list[list[str]]) -> list[str]:
    VGG_SHAPES["vgg-tiny"] = TINY_VGG
    problems = []
    for which, precision in runs:
        job = {**JOBS[which], "precision": precision}
        trainer, losses, held = trained(world, {**job, "layerwise": True})
        other, wanted, names = trained(world, job)
        near = {"rtol": 1e-9, "atol": 1e-10} if precision == "fp64" else {"rtol": 0.02, "atol": 0.02}
        if not isinstance(trainer.engine.replica, LayerwiseReplica):
            problems.append("layerwise was not asked")
        if not torch.allclose(torch.tensor(losses), torch.tensor(wanted), **near):
            problems.append(f"{which} in {precision}: losses {losses}, by zero3 {wanted}")
        if differ := held ^ names:
            problems.append(f"{which} in {precision}: state of other names: {sorted(differ)[:3]}")
        found, expected = (each.engine.replica.full_parameters() for each in (trainer, other))
        problems += [
            f"{which} in {precision}: {name} is off by {(found[name] - each).abs().max()}"
            for name, each in expected.items()
            if not torch.allclose(found[name], each, **near)
        ]
    return problems


def test_a_job_trains_as_zero3_does(on_ranks):
    runs = [("vgg", "fp64"), ("gpt", "fp64"), ("gpt by sgd", "fp16"), ("gpt by sgd", "pure_bf16")]
    assert on_ranks(2, wrong, runs=runs) == [[]] * 2
