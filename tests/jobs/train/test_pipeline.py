"""Pipelines against one process that takes the same micro-batches one after another; and faults that must be found."""

import itertools
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from muster.ddp.reduced import Reduced
from muster.jobs.models.shapes import VGG_SHAPES
from muster.jobs.spec.expand import layer_names
from muster.jobs.spec.job import Job
from muster.jobs.spec.modes import PIPELINES
from muster.jobs.spec.train import TrainSettings
from muster.jobs.spec.train_fields import ModelSettings
from muster.jobs.train import evaluate
from muster.jobs.train import verify as verification
from muster.jobs.train.engine import Engine
from muster.jobs.train.models import build_model
from muster.jobs.train.numerics import optim
from muster.jobs.train.parallel.stages import Stages
from muster.jobs.world.failures import is_lost_connection
from muster.jobs.world.world import World
from muster.pipe.ties import Ties
from support.resuming import ADAMW, SGD, TINY_VGG, attempt

pytestmark = pytest.mark.slow

VGG = {"model": "vgg-tiny", "data": "digits", "batch_size": 21, "optimizer": SGD}
MODEL = {"d_model": 16, "d_ff": 32, "layers": 3, "heads": 2, "context": 16}
GPT = {"model": {**MODEL, "tied": False, "dropout": 0.1}, "data": "synthetic", "batch_size": 11, "optimizer": ADAMW}
TIED = {**GPT, "model": MODEL, "clip_norm": 0.3}
PRODUCT = {"data": 2, "pipe": 2}


def verify(world: World, trains: list[dict], steps: int = 2, fault: str = "") -> list[dict | None]:
    """Compare some jobs with one process, in one start of ranks; and their outputs, for few samples."""
    evaluate.BLOCK_SAMPLES = 12
    VGG_SHAPES["vgg-tiny"] = TINY_VGG
    if fault:
        FAULTS[fault]()
    jobs = [Job(name="proof", kind="train", settings=TrainSettings.model_validate(train)) for train in trains]
    return [verification.verify(verification.reproducible(job), world, steps) for job in jobs]


def check(on_ranks: Any, world_size: int, *trains: dict, steps: int = 2) -> list[dict]:
    """Verify jobs; each must pass."""
    records = on_ranks(world_size, verify, trains=list(trains), steps=steps)[0]
    for train, record in zip(trains, records, strict=True):
        wrong = [row for row in record["rows"] if not row["ok"]] or record["differing_ranks"]
        assert record["pass"], f"{train}: {wrong}"
        if record["class"] == "bitwise":
            assert [row["name"] for row in record["rows"] if not row["bitwise"]] == [], train
    return records


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_schedule_has_the_bits_of_the_loop_over_micro_batches(on_ranks, world_size):
    # a rank may have the whole model; of four, interleaved and zbv would make 8 stages of the GPT's 6 layers
    of_two = [name for name in PIPELINES if name != "terapipe"]
    modes = {1: ["1f1b", "zbv"], 2: of_two, 4: ["model", "gpipe", "1f1b", "zb1p"]}[world_size]
    exact = {name: {"exact": True} if name in ("zb1p", "zbv") else {} for name in PIPELINES}
    more = {"1f1b": {"clip_norm": 0.05, "activation_checkpointing": True}}
    jobs = [{**GPT, "mode": name, "microbatches": 3, **exact[name]} for name in modes]
    jobs += [{**VGG, "mode": name, **exact[name], **more.get(name, {})} for name in modes if world_size == 2]
    jobs += [{**VGG, "mode": "interleaved"}] if world_size == 4 else []
    tied = ("1f1b", "interleaved", "zbv") if world_size == 2 else ()
    jobs += [{**TIED, "mode": name, "microbatches": 3, "exact": True} for name in tied]
    assert {record["class"] for record in check(on_ranks, world_size, *jobs)} == {"bitwise"}


@pytest.fixture
def text(tmp_path):
    """Leave a text of 37 windows to train on."""
    path = tmp_path / "text"
    path.write_text("she sells sea shells by the sea shore; " * 17)
    return {"text": str(path)}


@pytest.mark.ranks
def test_fewer_micro_batches_than_ranks_and_a_last_batch_of_few_samples(on_ranks, text):
    short = {**GPT, "data": text, "batch_size": 35, "microbatches": 9, "epochs": 2}  # the second step has 2 samples
    zbv = {**short, "mode": "zbv", "exact": True}
    few = [{**GPT, "mode": "1f1b", "microbatches": 2}, {**GPT, "mode": "gpipe", "microbatches": 1}]
    records = check(on_ranks, 3, {**short, "mode": "interleaved"}, zbv, *few, steps=3)
    assert records[0]["losses"][1] != records[0]["losses"][2]


@pytest.mark.ranks
def test_slices_of_sequences_stay_within_the_rounding_of_whole_ones(on_ranks):
    untied = {**GPT, "model": {**MODEL, "tied": False}}  # without dropout
    sliced = {"pipe": 2, "schedule": "terapipe", "microbatches": 2, "tokens": [3, MODEL["context"] - 3]}
    jobs = [{**untied, "mode": "terapipe"}, {**TIED, "parallel": sliced}]
    records = check(on_ranks, 2, *jobs, {**untied, "parallel": sliced, "precision": "fp64"})
    assert {record["class"] for record in records} == {"near"}
    assert max(row["difference"] for row in records[-1]["rows"]) < 1e-12, "in double precision"
    products = [{"data": 2, **sliced}, {"tensor": 2, **sliced}]
    check(on_ranks, 4, *({**untied, "parallel": each, "batch_size": 7} for each in products))


@pytest.mark.ranks
def test_sums_in_another_order_stay_within_their_rounding(on_ranks):
    split = [{**train, "mode": mode} for mode in ("zb1p", "zbv") for train in (VGG, TIED)]
    tied = [{**TIED, "mode": "1f1b"}, {**TIED, "mode": "interleaved", "precision": "fp64"}]
    records = check(on_ranks, 2, *split, *tied)
    assert {record["class"] for record in records} == {"tight"}
    assert "stages share a weight" in records[-1]["why"]
    assert max(row["difference"] for row in records[-1]["rows"]) < 1e-12, "in double precision"
    assert any(not row["bitwise"] for record in records for row in record["rows"]), "else this shows nothing"


@pytest.mark.ranks
def test_in_sixteen_bits_stages_compute_as_one_process_does(on_ranks):
    jobs = [{**GPT, "mode": "1f1b", "precision": precision} for precision in ("bf16", "fp16", "pure_bf16")]
    check(on_ranks, 2, *jobs, {**VGG, "mode": "gpipe", "precision": "pure_bf16"})


@pytest.mark.ranks
def test_pipelines_beside_each_other_average_their_gradients(on_ranks, text):
    # a batch of 21 or 11 has parts of different sizes; one of 36 leaves a sample, and a pipeline without any
    shared = [{**PRODUCT, "zero": 1, "schedule": "zbv"}, {**PRODUCT, "zero": 2}]
    jobs = [{**TIED, "parallel": each} for each in (PRODUCT, *shared)] + [{**VGG, "parallel": PRODUCT}]
    jobs += [{**TIED, "data": text, "batch_size": 36, "parallel": each, "epochs": 2} for each in (PRODUCT, shared[0])]
    check(on_ranks, 4, *jobs)


@pytest.mark.ranks
def test_stages_are_cut_as_the_job_says(on_ranks):
    cuts = [["block2", "norm"], [1, 4], "count", "parameters", "profile"]
    found = on_ranks(3, stages, trains=[{**GPT, "mode": "gpipe", "cut": cut} for cut in cuts])
    first, second, _ = found
    assert first[:3] == [["embed", "block1"], ["embed"], ["embed", "block1"]]
    assert second[:2] == [["block2", "block3"], ["block1", "block2", "block3"]]
    for place in range(len(cuts)):
        named = [name for rank in found for name in rank[place]]
        assert named == ["embed", "block1", "block2", "block3", "norm", "head"]


def stages(world: World, trains: list[dict]) -> list[list[str]]:
    built = [_build(world, train) for train in trains]
    return [[name for name, _ in each.engine.module.named_children()] for each in built]


def _build(world: World, train: dict) -> Any:
    from muster.jobs.train.data import open_data
    from muster.jobs.train.trainer import build_trainer

    settings = TrainSettings.model_validate(train)
    return build_trainer(settings, open_data(settings), world)


@pytest.mark.parametrize("model", ["vgg11", "gpt-nano", {**MODEL}])
def test_a_job_knows_the_layers_of_its_model_before_the_model_is_there(model):
    settings = ModelSettings.model_validate({"name": model} if isinstance(model, str) else model)
    built = build_model(settings, vocabulary=10, seed=0)
    assert layer_names(settings) == [name for name, _ in built.named_children()]


def _last_micro_batch_only() -> None:
    real, calls = Stages._loss, itertools.count(1)

    def loss(self: Any, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return real(self, logits, targets) * float(next(calls) % 3 == 0)

    Stages._loss = loss


def _no_share_of_the_batch() -> None:
    from muster.pipe.run import RowExecution

    real = RowExecution._gradient

    def whole(self: Any, number: int, microbatch: int) -> Any:
        gradient = real(self, number, microbatch)
        return torch.ones_like(gradient) if number == self.last_stage else gradient

    RowExecution._gradient = whole


def _no_sum_of_ties() -> None:
    Ties.sum_gradients = lambda self: None


def _no_average() -> None:
    Reduced.gradients_are_ready = lambda self, parameters: None
    Reduced.finish_gradient_synchronization = lambda self: None


def _norm_of_one_rank() -> None:
    real = optim.reproducible_norm
    optim.reproducible_norm = lambda tensors, group, *, reduce: real(tensors, group, reduce=False)


def _dropout_by_stage() -> None:
    Stages._seed_of = lambda self, microbatch, layer: microbatch


FAULTS = {
    "share": _no_share_of_the_batch,
    "ties": _no_sum_of_ties,
    "average": _no_average,
    "norm": _norm_of_one_rank,
    "seeds": _dropout_by_stage,
    "micro-batches": _last_micro_batch_only,
}


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("fault", "train"),
    [
        ("share", {**VGG, "mode": "1f1b"}),
        ("ties", {**TIED, "mode": "gpipe"}),
        ("average", {**VGG, "parallel": {"data": 2, "pipe": 1, "schedule": "1f1b"}}),
        ("norm", {**GPT, "mode": "zb1p", "clip_norm": 0.01}),
        ("seeds", {**GPT, "mode": "gpipe"}),
        ("micro-batches", {**VGG, "mode": "1f1b", "microbatches": 3}),
    ],
)
def test_a_broken_pipeline_fails_the_comparison(on_ranks, fault, train):
    (record,) = on_ranks(2, verify, trains=[train], fault=fault)[0]
    assert not record["pass"]


@pytest.mark.ranks
def test_a_norm_of_coarse_and_fine_gradients_is_as_coarse_as_the_coarsest(on_ranks):
    half = {**VGG, "precision": "pure_bf16", "clip_norm": 0.1}  # batch norms' gradients stay in float32
    (record,) = check(on_ranks, 2, {**half, "mode": "zbv", "microbatches": 3})
    assert record["class"] == "tight"
    assert [row["name"] for row in record["rows"] if row["name"].startswith("norm") and not row["bitwise"]]


def failing(world: World, way: dict, late: bool = False) -> list:
    """Train until the second rank raises, in a forward or its last backward; tell what came of it on this rank."""
    trainer = _build(world, {**GPT, **way, "bucket_size_mb": 0.001})
    steps, pipeline = trainer.own_steps(), trainer.engine.stages.pipeline
    trainer.engine.train_step(0, steps[0].shards)

    def raises(*_: object) -> None:
        if pipeline.in_last_backward or not late:
            raise ArithmeticError("the second stage has had enough")

    if world.rank == 1 and late:
        list(trainer.engine.module.parameters())[-1].register_post_accumulate_grad_hook(raises)  # the first to be ready
    elif world.rank == 1:
        next(trainer.engine.module.children()).register_forward_pre_hook(raises)
    try:
        trainer.engine.train_step(1, steps[1].shards)
    except Exception as error:
        return [type(error).__name__, str(error), is_lost_connection(error)]
    return []


@pytest.mark.ranks
@pytest.mark.parametrize("late", [False, True])
def test_where_pipelines_average_one_that_raises_is_the_culprit_and_nobody_hangs(on_ranks, late):
    found = on_ranks(4, failing, way={"parallel": PRODUCT}, late=late)
    assert found.pop(1) == ["ArithmeticError", "the second stage has had enough", False]
    assert found[0][2:] == [True], "its neighbour waits for a bucket"
    assert all(each[2:] in ([], [True]) for each in found), "stages that had done their part may have ended the step"


@pytest.mark.ranks
@pytest.mark.parametrize("mode", ["gpipe", "zbv"])
def test_a_stage_that_raises_is_the_culprit_and_the_other_ranks_are_its_victims(on_ranks, mode):
    first, second, third = on_ranks(3, failing, way={"mode": mode})
    assert second == ["ArithmeticError", "the second stage has had enough", False]
    for kind, said, is_victim in (first, third):
        assert (kind, is_victim) == ("StageFailedError", True)
        assert "rank 1" in said
        assert "the second stage has had enough" in said


def breaking(world: World, folder: str) -> list:
    """Let rank 0 raise in the last backward of a third step that the last rank has ended; tell what every rank did."""
    told = dist.FileStore(f"{folder}/told", world.size)
    manifest = Path(folder, "checkpoints", "step-00000001.a000", "MANIFEST.json")
    real, ended = Engine.train_step, list[int]()

    def train_step(self: Engine, step: int, shards: list) -> list:
        def raises(_: object) -> None:
            if self.stages.pipeline.in_last_backward:
                told.wait(["ended"])
                while not manifest.exists():  # a first save that nobody stops is complete
                    time.sleep(0.01)
                raise ArithmeticError("the first stage has had enough")

        if step == 2 and world.rank == 0:
            next(self.module.parameters()).register_post_accumulate_grad_hook(raises)
        losses = real(self, step, shards)
        ended.append(step)
        if step == 2 and world.rank == world.size - 1:
            told.set("ended", "")
        return losses

    Engine.train_step = train_step
    job = {**VGG, "mode": "1f1b", "steps": 3, "evaluate": False}
    try:
        attempt(world, folder, job, checkpoint={"every_steps": 1})
    except Exception as error:
        return [ended, is_lost_connection(error), str(error)]
    return [ended]


@pytest.mark.ranks
def test_a_step_that_failed_behind_the_last_rank_is_never_saved_and_ends_all_ranks(on_ranks, tmp_path):
    """The last rank has done its part, of the last step of all even, when rank 0 fails: no further step tells it."""
    first, second, last = on_ranks(3, breaking, folder=str(tmp_path))
    assert first[:2] == [[0, 1], False]
    assert "the first stage has had enough" in first[2]
    assert (second[1], last[:2]) == (True, [[0, 1, 2], True]), "a victim, not a cause"
    saved = {file.parent.name for file in tmp_path.glob("checkpoints/*/*")}
    assert "step-00000001.a000" in saved
    assert "step-00000003.a000" not in saved, "no rank saves before it has heard that all have done the step"
