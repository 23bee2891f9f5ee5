"""Split layers in jobs against one process on the same batches; and faults that must be found."""

import warnings
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

from muster.ddp.norms import reproducible_norm
from muster.jobs.spec.job import Job
from muster.jobs.spec.train import TrainSettings
from muster.jobs.train import evaluate, reference
from muster.jobs.train import verify as verification
from muster.jobs.train.numerics import optim
from muster.jobs.train.parallel.parallelize import RankModel
from muster.jobs.train.parallel.replica import LateReplica
from muster.jobs.world.world import World
from muster.pipe.tensor.region import Region
from support.resuming import ADAMW

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

SGD = {"name": "sgd", "lr": 0.05, "momentum": 0.9}
MODEL = {"d_model": 16, "d_ff": 32, "layers": 1, "heads": 4, "context": 16}
GPT = {"model": MODEL, "data": "synthetic", "batch_size": 11, "optimizer": ADAMW, "clip_norm": 0.3}
DROPOUT = {**GPT, "model": {**MODEL, "dropout": 0.1, "tied": False, "bias": True, "norm": "layer"}}
SEQUENCE = {"sequence_parallel": True}


def verify(world: World, trains: list[dict], steps: int = 2) -> list[dict | None]:
    """Compare some jobs with one process, in one start of ranks; and their outputs, for few samples."""
    evaluate.BLOCK_SAMPLES = 12
    jobs = [Job(name="proof", kind="train", settings=TrainSettings.model_validate(train)) for train in trains]
    return [verification.verify(verification.reproducible(job), world, steps) for job in jobs]


def check(on_ranks: Any, world_size: int, *trains: dict, within: float = 1e-5) -> list[dict]:
    """Verify jobs; each must pass, within bounds that are narrow."""
    records = on_ranks(world_size, verify, trains=list(trains))[0]
    for train, record in zip(trains, records, strict=True):
        wrong = [row for row in record["rows"] if not row["ok"]] or record["differing_ranks"]
        assert record["pass"], f"{train}: {wrong}"
        assert record["class"] == "near"
        if train.get("precision", "fp32") == "fp32":
            assert max(row["tolerance"] for row in record["rows"]) < within, train
    return records


def test_split_layers_compute_what_one_process_does(on_ranks):
    jobs = [
        {**GPT, "model": {**MODEL, "layers": 2}, "grad_accumulation": 2},
        {**GPT, "model": {**MODEL, "layers": 2}, **SEQUENCE, "precision": "fp64"},
        DROPOUT,
        {**DROPOUT, **SEQUENCE, "optimizer": SGD, "activation_checkpointing": True},
        *({**GPT, "precision": precision} for precision in ("bf16", "fp16", "pure_bf16")),
    ]
    jobs = [{**job, "mode": "tensor"} for job in jobs] + [{**GPT, "parallel": {"tensor": 2, "sync": "flat"}}]
    records = check(on_ranks, 2, *jobs)
    assert any(not row["bitwise"] for row in records[0]["rows"]), "else this shows nothing"
    assert max(row["tolerance"] for row in records[1]["rows"]) < 1e-13, "in double precision"


def test_copies_of_split_layers_average_their_gradients(on_ranks):
    product = {"data": 2, "tensor": 2}
    syncs = ["flat", "bucketed", "ddp", "gather_scatter", "overlap"]
    splits = [{**product, "sync": sync} for sync in syncs] + [{**product, "zero": zero} for zero in (1, 2)]
    jobs = [{**(DROPOUT if "zero" in split else GPT), "parallel": split} for split in splits]
    more = {"grad_accumulation": 2, "accumulate": "sharded", "bucket_size_mb": 0.01, "batch_size": 9}
    jobs.append({**GPT, "parallel": {**product, "zero": 2}, **SEQUENCE, **more})
    *_, alone = check(on_ranks, 4, *jobs, {**GPT, "mode": "tensor", "precision": "fp64"})
    assert max(row["tolerance"] for row in alone["rows"]) < 1e-13, "in double precision"


def test_stages_of_split_layers_beside_each_other(on_ranks):
    product = {"pipe": 2, "tensor": 2}
    jobs = [
        {**GPT, "parallel": {**product, "schedule": "zb1p"}, "microbatches": 3},
        {**DROPOUT, "parallel": {**product, "schedule": "zbv"}, **SEQUENCE, "precision": "fp64"},
        {**DROPOUT, "parallel": product},
        {**GPT, "parallel": product, "activation_checkpointing": True, "precision": "bf16"},
        {**GPT, "parallel": {**product, "schedule": "interleaved"}, "precision": "fp16", **SEQUENCE},
    ]
    check(on_ranks, 4, *jobs)


def compiled(world: World) -> bool:
    """Return whether compiled split layers pass; what they say to other ranks stays outside of compiled code."""
    warnings.simplefilter("ignore")  # the compiler itself reads what torch warns of
    with mock.patch("torch.compile", partial(torch.compile, backend="aot_eager")):
        (record,) = verify(world, [{**GPT, "mode": "tensor", "compile": True}])
    return record is not None and record["pass"]


def test_compiled_split_layers_compute_what_one_process_does(on_ranks):
    assert on_ranks(2, compiled)[0]  # rank 0 has the record


def test_all_three_ways_at_once(on_ranks):
    product = {"data": 2, "pipe": 2, "tensor": 2}
    check(on_ranks, 8, *({**GPT, "parallel": {**product, "zero": zero}, "microbatches": 2} for zero in (0, 1)))


def broken(world: World, trains: list[list]) -> list[bool]:
    """Return which of jobs, each with a fault, pass."""
    passed = []
    for fault, train in trains:
        with FAULTS[fault]():
            record = verify(world, [train], steps=2)[0]
        passed.append(record is not None and record["pass"])
    return passed


def _patched(where: Any, name: str, wrong: Any) -> Any:
    return lambda: mock.patch.object(where, name, wrong)


def _without_backward_sums(region: Region, x: torch.Tensor) -> Any:
    """Leave the sums of a backward out: what a forward makes has a graph, or is made within one."""
    return (lambda: x) if not torch.is_grad_enabled() and x.dim() == 3 else SUM(region, x)


SUM = Region.begin_sum
FAULTS = {
    "none": nullcontext,
    "one process draws as one": _patched(reference, "draw_as_split", lambda *_, **__: None),
    "sums of the backward are left out": _patched(Region, "begin_sum", _without_backward_sums),
    "whole gradients are counted by every rank": _patched(RankModel, "counted", lambda self: None),
    "every rank has a norm of its own": _patched(
        optim, "reproducible_norm", lambda tensors, *_, **__: reproducible_norm(tensors, reduce=False)
    ),
    "copies are not averaged": _patched(LateReplica, "finish", lambda self: None),
}


def test_a_fault_in_split_layers_fails_the_comparison(on_ranks):
    flat = {**DROPOUT, "parallel": {"data": 2, "tensor": 2, "sync": "flat"}}
    found = on_ranks(4, broken, trains=[[fault, flat] for fault in FAULTS])[0]
    assert dict(zip(FAULTS, found, strict=True)) == {fault: fault == "none" for fault in FAULTS}
