"""The ways in which ranks with the same layers average gradients: one row for every `sync` of `jobs/spec/modes.py`."""

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from muster.ddp import AllReduce, BucketedDDP, FlatAllReduce, GatherScatter, OverlappedDDP
from muster.ddp.base import DataParallel, broadcast
from muster.jobs.basics.errors import RefusedError
from muster.jobs.spec.modes import Parallel, Sync
from muster.jobs.train.models.units import units_of
from muster.jobs.train.parallel.forms import Forms
from muster.jobs.train.parallel.replica import LateReplica, OverlappedReplica, Replica, TorchReplica, WrappedReplica
from muster.jobs.train.parallel.sharded import ShardedReplica
from muster.jobs.train.profiling.clock import StepMarks
from muster.jobs.world.world import World
from muster.zero import ShardedDataParallel

if TYPE_CHECKING:
    from muster.jobs.spec.train import TrainSettings

SENT_AS: Final = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

Wrap = Callable[[nn.Module, World, "TrainSettings"], Any]


def replica_of(
    sync: Sync,
    module: nn.Module,
    forms: Forms,
    world: World,
    clock: StepMarks,
    settings: "TrainSettings",
    *,
    in_pipeline: bool,
) -> Replica:
    """Build the replica of this rank's layers: a collective of `world`, the ranks with the same layers.

    In a pipeline, the stages run the layers and decide when gradients may be averaged.

    Raises:
        RefusedError: if sync is none but several ranks have the same layers.
    """
    if sync == "none":
        if world.size > 1:
            raise RefusedError(f"train.parallel: sync none runs on one rank, but this job has {world.size}; set a sync")
        return Replica(module, world, clock)
    if sync == "fsdp":
        from muster.jobs.train.parallel.fsdp import FsdpReplica  # imports DTensor and sympy: 1.5 s of CPU time

        return FsdpReplica(module, forms, world, clock, settings)
    wrap, kind = SYNCS[sync]
    wrapper = wrap(module, world, settings)
    if kind is ShardedReplica:
        return ShardedReplica(wrapper, world, clock, marks_waits=not in_pipeline)
    return WrappedReplica(wrapper, world, clock) if in_pipeline else kind(wrapper, world, clock)


def _own(kind: type[DataParallel]) -> Wrap:
    return lambda module, world, settings: kind(module, world.group, **options(settings))


def _bucketed(module: nn.Module, world: World, settings: "TrainSettings") -> BucketedDDP:
    return BucketedDDP(module, world.group, bucket_size_mb=settings.bucket_size_mb, **options(settings))


def _torch_ddp(module: nn.Module, world: World, settings: "TrainSettings") -> DistributedDataParallel:
    # torch 2.13 renamed the option `broadcast_buffers` and warns about the old name.
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    switch = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    broadcast(list(module.buffers()), world.group)  # the old option also skips the broadcast at construction
    buffers: dict[str, Any] = {switch: False}
    device_ids = [world.device.index] if world.device.type == "cuda" else None
    return DistributedDataParallel(
        module,
        device_ids=device_ids,
        process_group=world.group,
        gradient_as_bucket_view=True,
        find_unused_parameters=settings.find_unused_parameters,
        **buffers,
    )


def _sharded(module: nn.Module, world: World, settings: "TrainSettings") -> ShardedDataParallel:
    assert settings.zero != 0
    return ShardedDataParallel(
        module,
        world.group,
        stage=settings.zero,
        units=None if settings.is_pipeline else units_of(module, settings.model),
        bucket_size_mb=settings.bucket_size_mb,
        # A resumed job may still set `accumulate`, which pipelines do not use.
        accumulate="local" if settings.is_pipeline else settings.accumulate,
        reshard_after_forward=settings.reshard_after_forward,
        **options(settings),
    )


SYNCS: Final[dict[Sync, tuple[Wrap, Callable[..., Replica]]]] = {
    "gather_scatter": (_own(GatherScatter), LateReplica),
    "allreduce": (_own(AllReduce), LateReplica),
    "flat": (_own(FlatAllReduce), LateReplica),
    "overlap": (_own(OverlappedDDP), OverlappedReplica),
    "bucketed": (_bucketed, OverlappedReplica),
    "ddp": (_torch_ddp, TorchReplica),
    "sharded": (_sharded, ShardedReplica),
}


def options(settings: "TrainSettings") -> dict[str, Any]:
    """Return the options that a job passes to all of Muster's wrappers."""
    return {
        "exact": settings.exact,
        "communication_dtype": communication_dtype(settings),
        "find_unused_parameters": settings.find_unused_parameters,
    }


def communication_dtype(settings: "TrainSettings") -> torch.dtype | None:
    """Return the dtype in which gradients are sent; None means their own."""
    return None if settings.communication_dtype is None else SENT_AS[settings.communication_dtype]


def needs_group(split: Parallel) -> bool:
    """Return True if a job with this split needs a process group."""
    return split.sync != "none" or bool(split.schedule) or split.world_size > 1
