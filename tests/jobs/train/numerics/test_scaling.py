"""A step with an infinite gradient is left out on every rank, and the scale finds its range."""

import pytest
import torch
from torch import nn

from muster.jobs.spec.modes import MODES, PIPELINES
from muster.jobs.spec.train_fields import OptimizerSettings
from muster.jobs.train.numerics.optim import build_optimizer
from muster.jobs.train.numerics.scaling import LossScaler
from muster.jobs.world.world import World

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
SGD = OptimizerSettings(name="sgd", lr=0.1, momentum=0.9)
ADAMW = OptimizerSettings(name="adamw", lr=0.1)


def step(scaler: LossScaler, optimizer: torch.optim.Optimizer, weight: nn.Parameter, gradient: float, **more) -> None:
    weight.grad = torch.full_like(weight, gradient) * scaler.scale
    scaler.prepare([weight.grad], more.get("clip_norm"))
    scaler.advance(optimizer)


@pytest.mark.parametrize("settings", [SGD, ADAMW], ids=["sgd", "adamw"])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("fused", [True, False])
def test_a_bad_step_is_left_out_halves_the_scale_and_leaves_no_trace(settings, bad, fused):
    # The bad one comes first, as it does in life: the fused SGD would keep a momentum that nobody has written.
    ours, plain = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(5))
    optimizer, reference = (build_optimizer([each], settings, cut_anywhere=not fused) for each in (ours, plain))
    scaler = LossScaler(CPU, start=1024.0)
    step(scaler, optimizer, ours, bad)
    assert (scaler.factor(), scaler.row()["skipped"].item()) == (512.0, 1.0)
    assert torch.equal(ours, torch.ones(5))
    for gradient in (0.5, -0.25, bad, 0.125):
        step(scaler, optimizer, ours, gradient)
        if gradient != bad and gradient == gradient:
            plain.grad = torch.full_like(plain, gradient)
            reference.step()
    assert torch.equal(ours, plain)
    assert all(torch.equal(value, reference.state[plain][key]) for key, value in optimizer.state[ours].items())
    assert scaler.factor() == 256.0


def test_the_scale_grows_back_after_enough_good_steps_in_a_row():
    weight = nn.Parameter(torch.ones(2))
    optimizer = build_optimizer([weight], SGD)
    scaler = LossScaler(CPU, start=64.0, growth_steps=3)
    scales = []
    for gradient in (1.0, 1.0, float("inf"), 1.0, 1.0, 1.0, 1.0):
        step(scaler, optimizer, weight, gradient)
        scales.append(scaler.factor())
    assert scales == [64.0, 64.0, 32.0, 32.0, 32.0, 64.0, 64.0]


def test_gradients_are_unscaled_before_they_are_clipped():
    weight = nn.Parameter(torch.zeros(4))
    optimizer = build_optimizer([weight], OptimizerSettings(lr=1.0))
    step(LossScaler(CPU, start=2.0**16), optimizer, weight, 0.5, clip_norm=2.0)  # their norm is 1: not clipped
    assert weight.tolist() == [-0.5] * 4


def test_a_scaler_s_state_is_what_a_checkpoint_fills():
    first, second = LossScaler(CPU, start=8.0, growth_steps=2), LossScaler(CPU, start=1.0, growth_steps=2)
    weight = nn.Parameter(torch.ones(1))
    optimizer = build_optimizer([weight], SGD)
    step(first, optimizer, weight, 1.0)
    for name, tensor in second.state().items():
        tensor.copy_(first.state()[name])
    for scaler in (first, second):
        step(scaler, optimizer, weight, 1.0)
    assert first.factor() == second.factor() == 16.0


def overflow(world: World, mode: str, accumulate: int) -> list:
    """Train 4 steps in fp16; on the last rank, in step 1, the last micro-batch's gradient has an infinity."""
    from muster.jobs.spec.train import TrainSettings
    from muster.jobs.train.data import open_data
    from muster.jobs.train.data.loading import move
    from muster.jobs.train.trainer import build_trainer
    from muster.jobs.train.verify import digest

    settings = TrainSettings.model_validate(
        {
            "model": {"d_model": 16, "d_ff": 32, "layers": 1, "heads": 2, "context": 8},
            "data": "synthetic",
            "batch_size": 16,
            "steps": 4,
            "precision": "fp16",
            "mode": mode,
            "microbatches" if mode in PIPELINES else "grad_accumulation": accumulate,
            "clip_norm": 1.0,
            "optimizer": {"name": "adamw", "lr": 0.01},
        }
    )
    trainer = build_trainer(settings, open_data(settings), world)
    engine, steps, told = trainer.engine, trainer.own_steps(), []
    seen = [0]
    poisoner = 0 if settings.is_pipeline else world.size - 1  # of a pipeline the first rank has the layer

    def poison(gradient: torch.Tensor) -> torch.Tensor:
        seen[0] += 1
        if seen[0] != 2 * accumulate or world.rank != poisoner:
            return gradient
        poisoned = gradient.clone()
        poisoned[0, 0, 0] = float("inf")  # one element of one parameter: of those that share it out, one rank's
        return poisoned

    def watch(module: nn.Module, inputs: object, output: torch.Tensor) -> None:
        output.register_hook(poison)

    if not settings.is_pipeline or world.rank == poisoner:
        engine.module.embed.token.register_forward_hook(watch)
    for number in range(4):
        shards = move(steps[number], world.device, trainer.dtype).shards
        engine.train_step(number, shards)
        figures = {name: float(value) for name, value in engine.scaler.row().items()}
        weights = digest(engine.model.full_state()["embed.position.weight"]).hex()
        told.append([figures["loss_scale"], figures["skipped"], weights])
    return told


@pytest.mark.ranks
@pytest.mark.parametrize("mode", [name for name in MODES if name not in ("single", *PIPELINES)] + ["1f1b"])
def test_every_rank_leaves_out_the_step_in_which_one_rank_overflowed(on_ranks, mode):
    first, *others = on_ranks(2, overflow, mode=mode, accumulate=2)
    assert all(each == first for each in others)
    assert [row[:2] for row in first] == [[65536.0, 0.0], [32768.0, 1.0], [32768.0, 0.0], [32768.0, 0.0]]
    weights = [row[2] for row in first]
    assert weights[1] == weights[0]
    assert len(set(weights)) == 3
