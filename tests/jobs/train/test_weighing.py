"""Padding: in every mode, a target that does not count changes nothing, wherever it lies.

The reference is a loop of plain PyTorch over whole batches, whose cross-entropy divides by the targets that count.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from muster.jobs.spec.job import Job
from muster.jobs.spec.modes import MODES, PIPELINES
from muster.jobs.spec.train import TrainSettings
from muster.jobs.train.data import open_data
from muster.jobs.train.evaluate import evaluate
from muster.jobs.train.metrics import global_losses
from muster.jobs.train.models import model_of
from muster.jobs.train.models.made import loss_of
from muster.jobs.train.trainer import Trainer, build_trainer
from muster.jobs.train.verify import verify
from muster.jobs.world.world import World

pytestmark = pytest.mark.slow

MADE = Path(__file__).parents[2] / "support" / "made"
PADDED = {"make": "padded.py:padded"}
FULL = {"make": "padded.py:padded", "args": {"lengths": [8] * 36}}
COUNTED = {"loss": "padded.py:counted"}
GPT = {"d_model": 16, "d_ff": 32, "layers": 1, "heads": 2, "context": 8, "vocabulary": 16}
JOB = {
    "model": GPT,
    "data": PADDED,
    "batch_size": 12,
    "steps": 3,
    "precision": "fp64",
    "evaluate": False,
    "optimizer": {"name": "sgd", "lr": 0.5, "momentum": 0.9},
}
STEPS = 3
# virtual ranks, and micro-batches of three samples or fewer
IN_PARTS = {name: {"microbatches": 3} if name in PIPELINES else {"grad_accumulation": 3} for name in MODES}
IN_PARTS |= {"tensor": {}, "model": {}, "terapipe": {"parallel": {"pipe": 2, "schedule": "terapipe", "tokens": [5, 3]}}}
OF_TWO = [name for name in MODES if name != "single"]
EXACT = [name for name in OF_TWO if MODES[name].can_be_exact]
PRODUCTS = (
    {"data": 2, "pipe": 2, "schedule": "1f1b", "microbatches": 3, "sync": "bucketed"},
    {"data": 2, "pipe": 2, "schedule": "gpipe", "microbatches": 2, "sync": "flat"},
    {"data": 2, "pipe": 2, "schedule": "zb1p", "microbatches": 3, "zero": 1},
    {"data": 2, "pipe": 2, "schedule": "1f1b", "microbatches": 3, "zero": 2},
    {"data": 2, "tensor": 2, "zero": 1},
    {"data": 2, "tensor": 2, "sync": "bucketed"},
)


def settings(keys: dict[str, Any]) -> TrainSettings:
    os.chdir(MADE)
    if "parallel" in keys:
        keys = {name: value for name, value in keys.items() if name != "mode"}
    return TrainSettings.model_validate(json.loads(json.dumps({**JOB, **keys})))


def by_plain_torch(keys: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    """Return losses and parameters of a loop over whole batches."""
    job = settings({"mode": "single", **keys})
    data = open_data(job)
    model = model_of(job, vocabulary=data.vocabulary).double()
    trainer = build_trainer(
        settings({"mode": "single", "batch_size": job.batch_size}), data, World(0, 1, None, torch.device("cpu"))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    losses = []
    for step in range(STEPS):
        ((micro,),) = (shard.micro_batches for shard in trainer.own_steps()[step].shards)
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(micro.inputs).flatten(0, 1), micro.targets.flatten(), ignore_index=-100)
        loss.backward()
        if job.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), job.clip_norm)
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: each.detach() for name, each in model.named_parameters()}


def train(trainer: Trainer, steps: int = STEPS) -> list[float]:
    reader, batches, losses = trainer.own_steps(), [], []
    for step in range(steps):
        trainer.clock.start()
        batches.append(reader[step].batch)
        losses.append(trainer.engine.train_step(step, reader[step].shards))
    return global_losses(trainer.world, batches, losses)


def wrong(world: World, every: list[dict[str, Any]]) -> list[str]:
    """Train by each of these settings; describe those whose losses or parameters differ from those of plain PyTorch."""
    found = []
    for keys in every:
        job = settings(keys)
        trainer = build_trainer(job, open_data(job), world)
        losses, state = train(trainer), trainer.engine.model.full_state()
        wanted_losses, wanted = by_plain_torch(
            {name: keys[name] for name in ("model", "batch_size", "clip_norm") if name in keys}
        )
        if losses != pytest.approx(wanted_losses, rel=1e-9):
            found.append(f"{keys}: losses {losses}, wanted {wanted_losses}")
        far = {name: (state[name] - each).abs().max().item() for name, each in wanted.items()}
        if not max(far.values()) < 1e-9:
            found.append(f"{keys}: {max(far, key=lambda name: far[name])} differs by {max(far.values())}")
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("loss", [{}, COUNTED], ids=["cross-entropy", "counted"])
def test_one_rank_with_micro_batches_of_padding_equals_a_loop_over_whole_batches(on_ranks, loss):
    every = [{"mode": "single", **loss}, {"mode": "single", "grad_accumulation": 6, "clip_norm": 0.1, **loss}]
    assert on_ranks(1, wrong, every=every, group=False) == [[]]


@pytest.mark.ranks
@pytest.mark.parametrize("mode", OF_TWO)
def test_every_mode_equals_one_process_on_padded_batches(on_ranks, mode):
    every = [{"mode": mode}, {"mode": mode, "clip_norm": 0.1, **IN_PARTS[mode]}]
    every += [] if mode == "tensor" else [{**every[1], **COUNTED}]  # which needs whole logits
    assert on_ranks(2, wrong, every=every) == [[], []]


@pytest.mark.ranks
@pytest.mark.parametrize("mode", EXACT)
def test_virtual_ranks_and_uneven_shards_count_targets(on_ranks, mode):
    if mode in PIPELINES:
        every = [{"mode": mode, "model": {**GPT, "layers": 3}, "exact": True, **IN_PARTS[mode]}]  # zbv has six stages
    else:
        every = [{"mode": mode, "exact": True, "virtual_ranks": 6, "clip_norm": 0.1}]
        every += [{"mode": mode, "exact": True, "virtual_ranks": 3 * 3, "grad_accumulation": 2}]
    assert on_ranks(3, wrong, every=every) == [[], [], []]


@pytest.mark.ranks
@pytest.mark.parametrize("product", PRODUCTS, ids=lambda product: "-".join(map(str, product.values())))
def test_products_of_degrees_count_the_targets_of_all_data_ranks(on_ranks, product):
    every = [{"parallel": product}, {"parallel": product, "clip_norm": 0.1}]
    every += [] if "tensor" in product else [{**every[1], **COUNTED, "batch_size": 7}]
    assert on_ranks(4, wrong, every=every) == [[]] * 4


@pytest.mark.ranks
def test_data_ranks_with_unequal_samples_count_targets(on_ranks):
    every: list[dict[str, Any]] = [{"mode": mode, "grad_accumulation": 2} for mode in ("bucketed", "ddp", "zero3")]
    assert on_ranks(5, wrong, every=every) == [[]] * 5


def bits(world: World, every: list[dict[str, Any]]) -> list[bool]:
    """Return whether full batches give the same bits weighed as not weighed."""
    found = []
    for keys in every:
        states, losses = [], []
        for weighed in (True, False):
            job = settings({"data": FULL, "precision": "fp32", **keys})
            trainer = build_trainer(job, open_data(job), world)
            assert trainer.engine.weights is not None
            if not weighed:
                trainer.engine.weights = trainer.engine.runs.weights = None
            losses.append(train(trainer, 2))
            states.append(trainer.engine.model.full_state())
        found.append(losses[0] == losses[1] and all(map(torch.equal, states[0].values(), states[1].values())))
    return found


@pytest.mark.ranks
def test_batches_whose_targets_all_count_keep_their_bits(on_ranks):
    every: list[dict[str, Any]] = [{"mode": mode, "clip_norm": 0.1, **IN_PARTS[mode]} for mode in OF_TWO]
    every += [{"mode": "ddp", "precision": precision} for precision in ("bf16", "pure_bf16", "fp16")]
    assert on_ranks(2, bits, every=every) == [[True] * len(every)] * 2


def verified(world: World, every: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        keys
        for keys in every
        if (
            record := verify(
                Job(name="padded", kind="train", settings=settings({"deterministic": True, **keys})), world, 3
            )
        )
        and not record["pass"]
    ]


@pytest.mark.ranks
def test_verify_agrees_on_padded_batches(on_ranks):
    every = [{"mode": mode, "clip_norm": 0.1, **IN_PARTS[mode]} for mode in ("allreduce", "bucketed", "zero3", "fsdp")]
    every += [{"mode": mode, "precision": "fp32", **COUNTED} for mode in ("1f1b", "zb1p", "allreduce")]
    every += [{"mode": "allreduce", "precision": precision} for precision in ("bf16", "fp16", "pure_bf16")]
    assert on_ranks(2, verified, every=every) == [[], []]


def test_a_batch_of_padding_changes_nothing_and_its_loss_is_zero(monkeypatch):
    monkeypatch.chdir(MADE)
    for loss in ({}, COUNTED):
        job = settings(
            {
                "mode": "single",
                "data": {"make": "padded.py:padded", "args": {"lengths": [0] * 12}},
                "grad_accumulation": 2,
                **loss,
            }
        )
        trainer = build_trainer(job, open_data(job), World(0, 1, None, torch.device("cpu")))
        before = {name: each.clone() for name, each in trainer.engine.model.full_state().items()}
        assert train(trainer, 1) == [0.0]
        assert all(torch.equal(each, before[name]) for name, each in trainer.engine.model.full_state().items())


@pytest.mark.parametrize("keys", [{}, COUNTED, {"precision": "bf16"}])
def test_an_evaluation_is_the_mean_over_the_targets_that_count(monkeypatch, keys):
    monkeypatch.chdir(MADE)
    job = settings({"mode": "single", **keys})
    data = open_data(job)
    trainer = build_trainer(job, data, World(0, 1, None, torch.device("cpu")))
    found = evaluate(trainer.engine, data, trainer.world, trainer.dtype, loss_of(job))
    inputs, targets = data.eval_batch(torch.arange(data.eval_samples))
    logits = trainer.engine.predict(inputs)
    assert found is not None
    assert found.loss == pytest.approx(
        functional.cross_entropy(logits.flatten(0, 1).double(), targets.flatten()).item()
    )
