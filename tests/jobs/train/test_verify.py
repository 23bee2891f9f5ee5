"""Every mode against one process: real ranks, the reference of `muster verify`, and faults that it must find."""

import io
from itertools import cycle

import pytest
import torch
import torch.distributed as dist
from rich.console import Console

from muster.ddp import means
from muster.ddp.after_backward import AllReduce, GatherScatter
from muster.ddp.base import DataParallel
from muster.jobs.models.shapes import VGG_SHAPES
from muster.jobs.spec.job import Job
from muster.jobs.spec.modes import MODES, PIPELINES, SHARDED, TENSOR
from muster.jobs.spec.train import TrainSettings
from muster.jobs.train import evaluate
from muster.jobs.train import verify as verification
from muster.jobs.train.data import image_sets
from muster.jobs.world.world import World
from support.resuming import ADAMW, SGD, SMALL_GPT, TINY_VGG
from support.soak import only_some

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

VGG = {"model": "vgg-tiny", "data": "digits", "batch_size": 19, "optimizer": SGD}
GPT = {"model": SMALL_GPT, "data": "synthetic", "batch_size": 10, "optimizer": ADAMW}
OF_MANY = [name for name in MODES if name not in ("single", TENSOR, *PIPELINES)]  # test_tensor.py, test_pipeline.py
WHOLE = [name for name in OF_MANY if name not in SHARDED]  # every rank has all of the state
# State that is shared out is tried on fewer worlds here: test_sharded.py has every stage on each of them, exact.
WORLDS = [
    *((mode, size) for mode in WHOLE for size in (1, 2, 3, 4)),
    *(("zero1", 4), ("zero2", 3), ("zero3", 4), ("fsdp", 3)),
]
KEPT = [each for each in WORLDS if each[0] in ("bucketed", *SHARDED) or each[1] in (2, 3)]
EXACT = [name for name, mode in MODES.items() if mode.can_be_exact and name not in PIPELINES]
WIRED = [mode for mode in EXACT if mode in WHOLE or mode == "zero2"]  # one of each way to send
# Several of one parameter and of many, for models this small.
SMALL_BUCKETS = {mode: {"bucket_size_mb": 0.02} for mode in ("bucketed", "zero1", "zero2")}


def verify(world: World, train: dict, steps: int = 2, fault: str = "", few: int = 1437) -> dict | None:
    """Compare a training on the first `few` digits. The second step depends on the first update."""
    VGG_SHAPES["vgg-tiny"] = TINY_VGG
    image_sets.DIGIT_TRAIN_SAMPLES, evaluate.BLOCK_SAMPLES = few, 8
    if fault:
        FAULTS[fault]()
    job = Job(name="proof", kind="train", settings=TrainSettings.model_validate(train))
    return verification.verify(verification.reproducible(job), world, steps)


def both(world: World, mode: str) -> list[dict | None]:
    """Verify a mode on both models; one start of ranks for the two."""
    more = {"mode": mode, **SMALL_BUCKETS.get(mode, {})}
    return [verify(world, {**train, **more}) for train in (VGG, GPT)]


def check(on_ranks, world_size: int, **train) -> dict:
    more = {name: train.pop(name) for name in ("steps", "few") if name in train}
    train |= SMALL_BUCKETS.get(train["mode"], {})
    record = on_ranks(world_size, verify, group=train["mode"] != "single", train=train, **more)[0]
    assert record["pass"], failures(record)
    return record


def failures(record: dict) -> object:
    return [row for row in record["rows"] if not row["ok"]] or record["differing_ranks"]


def not_bitwise(record: dict) -> list[str]:
    return [row["name"] for row in record["rows"] if not row["bitwise"]]


@pytest.mark.parametrize("train", [VGG, GPT], ids=["vgg", "gpt"])
def test_single_is_bitwise_the_reference(on_ranks, train):
    assert not_bitwise(check(on_ranks, 1, mode="single", **train)) == []


@pytest.mark.parametrize(("mode", "world_size"), only_some(WORLDS, KEPT))
def test_every_mode_keeps_its_promise_against_one_process(on_ranks, mode, world_size):
    for record in on_ranks(world_size, both, mode=mode)[0]:
        assert record["pass"], failures(record)
        assert record["class"] == MODES[mode].exactness(world_size)
        assert record["class"] == "tight" or not_bitwise(record) == []


@pytest.mark.parametrize(
    "mode",
    only_some(
        [name for name in WHOLE if MODES[name].exactness(3) == "tight"] + ["zero3", "fsdp"],
        ["bucketed", "ddp", "zero3", "fsdp"],
    ),
)
def test_in_double_precision_another_order_is_off_by_less_than_1e_12(on_ranks, mode):
    record = check(on_ranks, 3, mode=mode, **{**VGG, "precision": "fp64"})
    far = [row["name"] for row in record["rows"] if max(row["difference"], row["drift"] or 0.0) > 1e-12]
    assert far == []


@pytest.mark.parametrize("mode", only_some([*WHOLE, "zero3"], ["bucketed", "ddp", "zero3"]))  # and below, exact
def test_accumulation_clipping_and_a_schedule_change_nothing_about_equality(on_ranks, mode):
    more = {"grad_accumulation": 3, "clip_norm": 0.5, "schedule": {"name": "cosine", "warmup_steps": 2}, "steps": 3}
    check(on_ranks, 2, mode=mode, **VGG, **more)


@pytest.mark.parametrize("mode", ["gather_scatter", "bucketed", "ddp", "zero3"])  # one of each kind of replica
def test_a_short_last_batch_with_an_empty_shard_matches_one_process(on_ranks, mode):
    # the second step has three samples for four ranks, and the third begins an epoch
    check(on_ranks, 4, mode=mode, steps=3, few=22, **VGG, epochs=2)


@pytest.mark.parametrize(
    ("mode", "world_size"),
    only_some(
        [(mode, size) for mode in EXACT for size in (2, 4) if mode in WHOLE or (mode, size) == ("zero3", 4)],
        [("bucketed", 2), *((mode, 4) for mode in EXACT if mode in WHOLE or mode == "zero3")],
    ),
)
def test_exact_is_bitwise_one_process_on_every_world_that_divides(on_ranks, mode, world_size):
    more = {"exact": True, "virtual_ranks": 4, "grad_accumulation": 2, "clip_norm": 0.5}
    record = check(on_ranks, world_size, mode=mode, **VGG, **more)
    assert (record["class"], not_bitwise(record)) == ("bitwise", [])


@pytest.mark.parametrize(
    "more",
    [
        {"mode": "zero1", "accumulate": "sharded"},
        {"mode": "zero2", "accumulate": "sharded"},
        {"mode": "zero3", "accumulate": "sharded", "reshard_after_forward": False},
        {"mode": "fsdp", "accumulate": "sharded", "reshard_after_forward": False},
    ],
    ids=lambda more: "-".join(map(str, more.values())),
)
def test_every_way_to_share_out_agrees_with_one_process(on_ranks, more):
    check(on_ranks, 3, **VGG, **more, grad_accumulation=3, clip_norm=0.5)


@pytest.mark.parametrize(("mode", "sent_as"), [*zip(WIRED, cycle(("bf16", "fp16"))), ("bucketed", "fp16")])
def test_gradients_sent_in_a_coarser_type_stay_within_its_rounding(on_ranks, mode, sent_as):
    record = check(on_ranks, 2, mode=mode, **{**VGG, "communication_dtype": sent_as})
    assert record["class"] == "tight"
    assert f"sent in {sent_as}" in record["why"]
    gradients = [row for row in record["rows"] if row["kind"] == "gradient"]
    rounded = [row for row in gradients if row["difference"] > 1e-4 * row["tolerance"]]
    assert len(rounded) > len(gradients) / 2, "they were sent as they were"


def test_dropout_is_keyed_so_that_ranks_draw_what_one_process_draws(on_ranks):
    record = check(
        on_ranks, 2, mode="gather_scatter", **{**GPT, "model": {**SMALL_GPT, "dropout": 0.2}}, grad_accumulation=2
    )
    assert not_bitwise(record) == []


def _skip_the_division() -> None:
    AllReduce._mean = lambda self, gradients: (dist.all_reduce(gradients[0], group=self.process_group), gradients[0])[1]
    means.AllReduceMean.__init__ = means.Mean.__init__  # multiplies by one


def _skip_one_parameter() -> None:
    trainable = DataParallel.trainable
    DataParallel.trainable = lambda self: trainable(self)[1:]


def _skip_the_broadcast_and_start_apart() -> None:
    build = verification.build_trainer

    def apart(settings, data, world):
        trainer = build(settings, data, world)
        if world.rank == 1:
            with torch.no_grad():
                next(trainer.engine.module.parameters()).mul_(1.001)
        return trainer

    verification.build_trainer = apart


def _swap_shards() -> None:
    ordered, gathered = means.ordered_mean, GatherScatter._mean
    means.ordered_mean = lambda shards, out, group: ordered(shards[::-1], out, group)
    GatherScatter._mean = lambda self, gradients: gathered(self, gradients[::-1])


FAULTS = {
    "division": _skip_the_division,
    "parameter": _skip_one_parameter,
    "broadcast": _skip_the_broadcast_and_start_apart,
    "order": _swap_shards,
}


@pytest.mark.parametrize(
    ("fault", "mode", "optimizer"),
    [
        ("division", "allreduce", ADAMW),  # whose steps do not depend on the gradient's scale
        ("division", "bucketed", ADAMW),
        ("division", "flat", SGD),
        ("parameter", "allreduce", SGD),
        ("parameter", "overlap", ADAMW),
        ("broadcast", "ddp", SGD),
        ("broadcast", "bucketed", SGD),
    ],
)
def test_a_broken_mode_fails_the_comparison(on_ranks, fault, mode, optimizer):
    train = {**VGG, "optimizer": optimizer, "mode": mode}
    for world_size in (2, 3):  # allreduce is held to the bitwise and to the tight class
        record = on_ranks(world_size, verify, train=train, fault=fault)[0]
        assert not record["pass"]


@pytest.mark.parametrize("mode", ["gather_scatter", "flat", "bucketed"])
def test_exact_sums_in_another_order_fail_the_comparison(on_ranks, mode):
    train = {**VGG, "mode": mode, "exact": True, "virtual_ranks": 4}
    record = on_ranks(1, verify, train=train, fault="order")[0]
    assert not record["pass"]


def test_the_view_names_each_tensor_and_closes_with_the_verdict(on_ranks):
    from muster.launch.look.verify_view import render

    good = check(on_ranks, 2, mode="gather_scatter", **VGG)
    bad = on_ranks(2, verify, train={**VGG, "mode": "allreduce"}, fault="division")[0]
    texts = []
    for record in (good, bad):
        stream = io.StringIO()
        Console(file=stream, width=160).print(render(record))
        texts.append(stream.getvalue())
    assert all(row["name"] in texts[0] for row in good["rows"] if row["kind"] in ("parameter", "buffer"))
    assert "bitwise equal" in texts[0]
    assert "PASS  class bitwise" in texts[0]
    assert "FAIL  class bitwise" in texts[1]
    assert "not bitwise equal" in texts[1]
