"""Whole trainings in every precision: they learn as float32 does, agree with one process, and resume bit by bit."""

import json
from pathlib import Path

import pytest

from muster.jobs.spec.job import Job
from muster.jobs.spec.modes import MODES, PIPELINES, TENSOR
from muster.jobs.spec.train import TrainSettings
from muster.jobs.train import verify as verification
from muster.jobs.world.world import World
from support.resuming import ADAMW, SGD, TINY_VGG, attempt, hashes
from support.soak import only_some

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

MODEL = {"d_model": 16, "d_ff": 32, "layers": 2, "heads": 2, "context": 16}
GPT = {"model": MODEL, "data": "synthetic", "batch_size": 12, "steps": 8, "optimizer": ADAMW, "evaluate": False}
VGG = {"model": "vgg-tiny", "data": "digits", "batch_size": 24, "steps": 8, "optimizer": SGD, "evaluate": False}
LOW = ["bf16", "fp16", "pure_bf16"]
MODES_OF_MANY = [name for name in MODES if name not in ("single", "zero1", "zero2", TENSOR, *PIPELINES)]  # as zero3


def rows(folder: Path, *, evaluation: bool = False) -> list[dict]:
    read = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in read if row.get("evaluation", False) == evaluation]


# How far the first loss may be from float32's: 16 bits round each product by 2^-9 (bfloat16) or 2^-12. Later ones are
# those of other weights by then, and are held to the course only.
WITHIN = {"fp64": 1e-6, "bf16": 1e-3, "fp16": 1e-4, "pure_bf16": 1e-3}


def every(world: World, folder: str, settings: dict) -> None:
    for precision in ("fp32", *WITHIN):
        assert attempt(world, f"{folder}/{precision}", {**settings, "precision": precision}) == 0


@pytest.mark.parametrize("settings", only_some([GPT, VGG], [GPT]), ids=["gpt", "vgg"])
def test_losses_go_as_in_float32_and_evaluation_too(on_ranks, tmp_path, settings):
    text = tmp_path / "text"
    text.write_text("she sells sea shells by the sea shore; " * 100)
    job = {**settings, "mode": "single", "evaluate": True, "steps": 20}
    job["data"] = {"text": str(text)} if settings is GPT else settings["data"]
    job["optimizer"] = {**settings["optimizer"], "lr": 0.02 if settings is GPT else 0.05}
    on_ranks(1, every, group=False, folder=str(tmp_path), settings=job)
    losses = {each: [row["loss"] for row in rows(tmp_path / each)] for each in ("fp32", *WITHIN)}
    wanted = losses["fp32"]
    assert wanted[-1] < 0.7 * wanted[0], "else the course shows nothing"
    evaluated = {each: rows(tmp_path / each, evaluation=True)[-1]["loss"] for each in losses}
    for precision, within in WITHIN.items():
        assert losses[precision][0] == pytest.approx(wanted[0], rel=within), precision
        assert losses[precision] == pytest.approx(wanted, rel=0.1), precision
        assert evaluated[precision] == pytest.approx(evaluated["fp32"], rel=0.1), precision
        scales = [(row.get("loss_scale"), row.get("skipped")) for row in rows(tmp_path / precision)]
        assert set(scales) == ({(65536.0, 0.0)} if precision == "fp16" else {(None, None)})


@pytest.mark.parametrize(
    ("settings", "precision"),
    only_some(
        [(GPT, "fp16"), (GPT, "pure_bf16"), (VGG, "bf16"), (VGG, "pure_bf16")], [(GPT, "fp16"), (VGG, "pure_bf16")]
    ),
    ids=["gpt-fp16", "gpt-pure", "vgg-bf16", "vgg-pure"],
)
def test_every_precision_resumes_bit_by_bit(on_ranks, tmp_path, settings, precision):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    job = {**settings, "mode": "bucketed", "precision": precision, "clip_norm": 0.5, "grad_accumulation": 2}
    job |= {"activation_checkpointing": True, "steps": 6}
    assert on_ranks(2, attempt, folder=str(whole), settings=job) == [0, 0]
    assert on_ranks(2, attempt, folder=str(parts), settings=job, stop_at=3) == [75, 75]
    assert on_ranks(2, attempt, folder=str(parts), settings={**job, "mode": "ddp"}, number=1) == [0, 0]
    found = hashes(parts)
    assert found == hashes(whole)
    assert ("scaling/scale" in found) == ("scaling/good_steps" in found) == (precision == "fp16")
    assert any(name.endswith("/master") for name in found) == (precision == "pure_bf16")


def proofs(world: World, **settings) -> list[tuple[str, dict | None]]:
    """Verify both models in every precision of 16 bits."""
    from muster.jobs.models.shapes import VGG_SHAPES
    from muster.jobs.train import evaluate

    VGG_SHAPES["vgg-tiny"], evaluate.BLOCK_SAMPLES = TINY_VGG, 12  # outputs to compare
    records = []
    for precision in LOW:
        for each in (GPT, VGG):
            train = TrainSettings.model_validate({**each, **settings, "precision": precision})
            job = Job(name="proof", kind="train", settings=train)
            records.append((precision, verification.verify(verification.reproducible(job), world, 2)))
    return records


@pytest.mark.parametrize("mode", only_some(MODES_OF_MANY, ["bucketed", "zero3", "fsdp"]))
def test_every_mode_agrees_with_one_process_in_every_precision(on_ranks, mode):
    # The reference forwards nothing again.
    for precision, record in on_ranks(2, proofs, mode=mode, clip_norm=1.0, activation_checkpointing=True)[0]:
        assert record["pass"], (precision, [row for row in record["rows"] if not row["ok"]])


def test_exact_sums_stay_exact_in_16_bits(on_ranks):
    for precision, record in on_ranks(2, proofs, mode="bucketed", exact=True, virtual_ranks=4)[0]:
        assert record["pass"], precision
        assert all(row["bitwise"] for row in record["rows"])


def test_dropout_draws_the_same_when_a_block_is_forwarded_again(on_ranks, tmp_path):
    found = []
    for again in (False, True):
        folder = tmp_path / str(again)
        job = {**GPT, "steps": 4, "model": {**MODEL, "dropout": 0.2}, "mode": "ddp"}
        job["activation_checkpointing"] = again
        assert on_ranks(2, attempt, folder=str(folder), settings=job) == [0, 0]
        found.append(hashes(folder))
    assert found[0] == found[1]
