"""The rank side of `jobs/spec/modes.py`: how a `sync` wraps a model, as a table."""

import inspect
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from muster.ddp import AllReduce, BucketedDDP, FlatAllReduce, GatherScatter, OverlappedDDP
from muster.ddp.base import DataParallel, broadcast
from muster.jobs.basics.errors import RefusedError
from muster.jobs.spec.modes import Parallel, Sync
from muster.jobs.spec.train import TrainSettings
from muster.jobs.train.fsdp import FsdpReplica
from muster.jobs.train.layerwise import LayerwiseReplica
from muster.jobs.train.models.stack import Stack
from muster.jobs.train.models.units import units_of
from muster.jobs.train.profiling.clock import Clock
from muster.jobs.train.replica import LateReplica, OverlappedReplica, Replica, TorchReplica
from muster.jobs.train.sharded import ShardedReplica
from muster.jobs.train.shards import Forms
from muster.jobs.world.world import World
from muster.zero import ShardedDataParallel
from muster.zero.layerwise import Layerwise

SENT_AS: Final = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

Wrap = Callable[[nn.Module, World, Clock, TrainSettings], Replica]


def _alone(module: nn.Module, world: World, clock: Clock, settings: TrainSettings) -> Replica:
    if world.size > 1:
        raise RefusedError(f"train.parallel: sync none runs on one rank, this job has {world.size}; set a sync")
    return Replica(module, world, clock)


def _late(kind: type[DataParallel]) -> Wrap:
    def wrap(module: nn.Module, world: World, clock: Clock, settings: TrainSettings) -> Replica:
        return LateReplica(kind(module, world.group, **options(settings)), world, clock)

    return wrap


def _overlapped(module: nn.Module, world: World, clock: Clock, settings: TrainSettings) -> Replica:
    return OverlappedReplica(OverlappedDDP(module, world.group, **options(settings)), world, clock)


def _bucketed(module: nn.Module, world: World, clock: Clock, settings: TrainSettings) -> Replica:
    size_mb = settings.bucket_size_mb
    wrapper = BucketedDDP(module, world.group, bucket_size_mb=size_mb, **options(settings))
    return OverlappedReplica(wrapper, world, clock)


def options(settings: TrainSettings) -> dict[str, Any]:
    """Return what a job says to all of our own wrappers alike."""
    return {"exact": settings.exact, "communication_dtype": communication_dtype(settings)}


def communication_dtype(settings: TrainSettings) -> torch.dtype | None:
    """Return what a job's gradients are sent as; None: as they are."""
    return None if settings.communication_dtype is None else SENT_AS[settings.communication_dtype]


def _torch_ddp(module: nn.Module, world: World, clock: Clock, settings: TrainSettings) -> Replica:
    # torch 2.13 renamed the switch and warns about the old name.
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    switch = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    broadcast(list(module.buffers()), world.group)  # with the old name the wrapper leaves buffers as they are
    buffers: dict[str, Any] = {switch: False}
    device_ids = [world.device.index] if world.device.type == "cuda" else None
    wrapper = DistributedDataParallel(
        module, device_ids=device_ids, process_group=world.group, gradient_as_bucket_view=True, **buffers
    )
    return TorchReplica(wrapper, world, clock)


def _sharded(module: nn.Module, world: World, clock: Clock, settings: TrainSettings) -> Replica:
    forms = Forms(module)
    if settings.layerwise and settings.zero == 3:
        assert isinstance(module, Stack)
        return LayerwiseReplica(Layerwise(module, world.group, loss=module.run_loss), forms, world, clock)
    stage = settings.zero
    assert stage != 0
    wrapper = ShardedDataParallel(
        module,
        world.group,
        stage=stage,
        units=units_of(module),
        bucket_size_mb=settings.bucket_size_mb,
        accumulate=settings.accumulate,
        reshard_after_forward=settings.reshard_after_forward,
        **options(settings),
    )
    return ShardedReplica(wrapper, forms, world, clock)


def _fsdp(module: nn.Module, world: World, clock: Clock, settings: TrainSettings) -> Replica:
    return FsdpReplica(
        module,
        world,
        clock,
        accumulate=settings.accumulate,
        reshard_after_forward=settings.reshard_after_forward,
    )


WRAP: Final[dict[Sync, Wrap]] = {
    "none": _alone,
    "gather_scatter": _late(GatherScatter),
    "allreduce": _late(AllReduce),
    "flat": _late(FlatAllReduce),
    "overlap": _overlapped,
    "bucketed": _bucketed,
    "ddp": _torch_ddp,
    "sharded": _sharded,
    "fsdp": _fsdp,
}


def needs_group(split: Parallel) -> bool:
    """True when a job of this split must make a process group."""
    return split.sync != "none" or bool(split.schedule) or split.world_size > 1


def broadcast_buffers(module: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Overwrite every rank's buffers with rank 0's."""
    if group is not None:
        broadcast(list(module.buffers()), group)
