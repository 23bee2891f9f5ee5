"""How a mode's wrapper is built and driven: what a job says reaches it, and only the last micro-batch communicates."""

from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist

from muster.ddp.base import DataParallel
from muster.jobs.models.shapes import POOL, VGG_SHAPES, VggShape
from muster.jobs.spec.modes import MODES, PIPELINES, SHARDED, Sync
from muster.jobs.spec.train import TrainSettings
from muster.jobs.train.data import open_data
from muster.jobs.train.parallel.replica import Replica, WrappedReplica
from muster.jobs.train.parallel.syncs import SYNCS
from muster.jobs.train.trainer import build_trainer
from muster.jobs.world.world import World

pytestmark = pytest.mark.slow

TINY_VGG = VggShape("vgg-tiny", (8, POOL, 8, POOL, 16, POOL, 16, POOL, 16, POOL))
VGG = {"model": "vgg-tiny", "data": "digits", "batch_size": 24, "evaluate": False}
OWN = [name for name, mode in MODES.items() if mode.can_be_exact and name not in (*SHARDED, *PIPELINES)]
SMALL_BUCKETS = {"bucketed": {"bucket_size_mb": 0.01}}
PARAMETERS, BUCKETS = 22, 3  # of the tiny VGG: five convolutions with norms, the head; its buckets of 10 KB


def test_every_way_to_synchronize_has_its_wrapper():
    assert {*SYNCS, "none", "fsdp"} == set(get_args(Sync))


def build(world: World, settings: dict[str, Any]) -> Any:
    VGG_SHAPES["vgg-tiny"] = TINY_VGG
    job = TrainSettings.model_validate(settings)
    return build_trainer(job, open_data(job), world)


def collectives(world: World, settings: dict[str, Any], fault: bool) -> list[list[Any]]:
    """Return the collectives of the second step by name, and whether each began within the last backward."""
    if fault:
        WrappedReplica.accumulating = Replica.accumulating
    trainer, begun = build(world, settings), []
    reader = trainer.own_steps()
    trainer.clock.start()
    trainer.engine.train_step(0, reader[0].shards)  # asks besides who uses which parameter
    for name in ("all_reduce", "gather", "scatter"):
        real = getattr(dist, name)

        def counted(*arguments: Any, real: Any = real, name: str = name, **keywords: Any) -> Any:
            begun.append([name, torch._C._current_graph_task_id() != -1])
            return real(*arguments, **keywords)

        setattr(dist, name, counted)
    trainer.engine.train_step(1, reader[1].shards)
    return begun


WANTED = {
    "gather_scatter": [["gather", False], ["scatter", False]] * PARAMETERS,
    "allreduce": [["all_reduce", False]] * PARAMETERS,
    "flat": [["all_reduce", False]],
    "overlap": [["all_reduce", True]] * PARAMETERS,
    "bucketed": [["all_reduce", True]] * BUCKETS,
}


@pytest.mark.ranks
@pytest.mark.parametrize("mode", OWN)
def test_of_three_micro_batches_only_the_last_communicates_and_in_its_backward_where_it_overlaps(on_ranks, mode):
    settings = {**VGG, "mode": mode, "grad_accumulation": 3, **SMALL_BUCKETS.get(mode, {})}
    for begun in on_ranks(2, collectives, settings=settings, fault=False):
        assert begun == WANTED[mode]


@pytest.mark.ranks
def test_a_mode_that_communicated_after_every_micro_batch_would_be_found(on_ranks):
    settings = {**VGG, "mode": "bucketed", "grad_accumulation": 3, "bucket_size_mb": 0.01}
    (begun, _) = on_ranks(2, collectives, settings=settings, fault=True)
    assert len(begun) == 3 * BUCKETS


def said(world: World, settings: dict[str, Any]) -> list[Any]:
    wrapper = build(world, settings).engine.replica.wrapper
    assert isinstance(wrapper, DataParallel)
    size = getattr(wrapper, "bucket_size_mb", "none")
    return [type(wrapper).__name__, wrapper.exact, str(wrapper.communication_dtype), size]


def said_of_shards(world: World, settings: list[dict[str, Any]]) -> list[list[Any]]:
    wrappers = [build(world, each).engine.replica.wrapper for each in settings]
    names = ("stage", "exact", "bucket_size_mb", "accumulate", "reshard_after_forward")
    return [[*(getattr(wrapper, name) for name in names), str(wrapper.communication_dtype)] for wrapper in wrappers]


@pytest.mark.ranks
def test_what_a_job_says_reaches_what_shares_its_state_out(on_ranks):
    more = {"accumulate": "sharded", "reshard_after_forward": False, "communication_dtype": "bf16"}
    jobs = [{"mode": "zero1", "exact": True}, {"mode": "zero2", "bucket_size_mb": 3.0}, {"mode": "zero3", **more}]
    (found,) = on_ranks(1, said_of_shards, settings=[{**VGG, **each} for each in jobs])
    assert found == [
        [1, True, 25.0, "local", True, "None"],
        [2, False, 3.0, "local", True, "None"],
        [3, False, 25.0, "sharded", False, "torch.bfloat16"],
    ]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"mode": "bucketed"}, ["BucketedDDP", False, "None", 25.0]),
        ({"mode": "bucketed", "bucket_size_mb": 4.5}, ["BucketedDDP", False, "None", 4.5]),
        ({"mode": "bucketed", "bucket_size_mb": None}, ["BucketedDDP", False, "None", None]),
        ({"mode": "bucketed", "exact": True}, ["BucketedDDP", True, "None", 25.0]),
        ({"mode": "overlap", "communication_dtype": "bf16"}, ["OverlappedDDP", False, "torch.bfloat16", 0.0]),
        ({"mode": "flat", "communication_dtype": "fp16"}, ["FlatAllReduce", False, "torch.float16", None]),
        ({"parallel": {"sync": "allreduce"}, "exact": True}, ["AllReduce", True, "None", "none"]),
        ({"mode": "gather_scatter", "communication_dtype": "fp32"}, ["GatherScatter", False, "torch.float32", "none"]),
    ],
)
def test_what_a_job_says_reaches_its_wrapper(on_ranks, settings, wanted):
    assert on_ranks(1, said, settings={**VGG, **settings}) == [wanted]
