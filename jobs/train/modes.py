"""The rank side of `jobs/modes.py`: how a `sync` wraps a model, as a table. The engine sees only a `Replica`.

shard 0   F B  F B |  shard 1   F B  F B |          every backward but the last only accumulates
                   next_shard            finish      a late replica averages here
                                      ^-- an overlapped one in the last backward
"""

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from ddp import AllReduce, BucketedDDP, FlatAllReduce, GatherScatter, OverlappedDDP
from ddp.base import DataParallel, broadcast
from jobs.errors import RefusedError
from jobs.modes import Sync
from jobs.train.clock import Clock
from jobs.train.world import World
from jobs.train_settings import TrainSettings

SENT_AS: Final = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Replica:
    """One rank's copy of the model, alone: nothing is synchronized."""

    learns_from_first = False  # True: the first backward decides in which order the later ones sum

    def __init__(self, module: nn.Module, clock: Clock) -> None:
        self.module = module
        self.clock = clock

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Run the model; return its mean loss."""
        loss: Tensor = self.module(inputs, targets)
        return loss

    def accumulating(self) -> AbstractContextManager[Any]:
        """Return the context of every micro-batch but a rank's last: its gradients only accumulate."""
        return nullcontext()

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradients of a micro-batch; `last` is the rank's last one of the step."""
        torch.autograd.backward(loss)
        self.clock.lap("backward")

    def next_shard(self) -> None:
        """Go from one virtual rank to the next one."""

    def finish(self) -> None:
        """Make the gradients the mean over all virtual ranks."""


class WrappedReplica(Replica):
    """A copy inside a wrapper, which keeps gradients on this rank while it is asked to."""

    def __init__(self, wrapper: DataParallel | DistributedDataParallel, clock: Clock) -> None:
        super().__init__(wrapper.module, clock)
        self.wrapper = wrapper

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Run the model through the wrapper."""
        loss: Tensor = self.wrapper(inputs, targets)
        return loss

    def accumulating(self) -> AbstractContextManager[Any]:
        """Keep the wrapper from communicating."""
        return self.wrapper.no_sync()

    def next_shard(self) -> None:
        """Keep the gradients of the virtual rank before apart, so that they are summed in order."""
        assert isinstance(self.wrapper, DataParallel), "PyTorch's wrapper sums in no promised order"
        self.wrapper.next_shard()
        self.clock.lap("backward")


class LateReplica(WrappedReplica):
    """A copy whose gradients are averaged after the backward: all of the wait is exposed."""

    def finish(self) -> None:
        """Average the gradients."""
        assert isinstance(self.wrapper, DataParallel)
        self.wrapper.finish_gradient_synchronization()
        self.clock.lap("communication")


class OverlappedReplica(WrappedReplica):
    """A copy whose gradients are averaged during the last backward: the wait after the last gradient is exposed."""

    def __init__(self, wrapper: DataParallel | DistributedDataParallel, clock: Clock) -> None:
        super().__init__(wrapper, clock)
        self.ready = LastGradient(wrapper.module, clock)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add gradients; when the last micro-batch's returns they are the mean."""
        if not last:
            super().backward(loss, last=last)
            return
        with self.ready:
            torch.autograd.backward(loss)
        self.clock.lap("communication")


class TorchReplica(OverlappedReplica):
    """A copy inside PyTorch's DistributedDataParallel.

    It deals gradients anew to its buckets after the first backward, and where a gradient lies in a bucket decides in
    which order more than two ranks add it up.
    """

    learns_from_first = True


class LastGradient:
    """Within its context, marks the end of the backward at the gradient that becomes ready last.

    The first backward watches all parameters to learn which one that is; later ones watch only it.
    """

    def __init__(self, module: nn.Module, clock: Clock) -> None:
        self.clock = clock
        self.last: Tensor | None = None
        self.armed = False
        self.handles = [self._watch(parameter) for parameter in module.parameters() if parameter.requires_grad]

    def __enter__(self) -> None:
        self.armed = True

    def __exit__(self, *error: object) -> None:
        self.armed = False
        if len(self.handles) > 1 and self.last is not None:
            for handle in self.handles:
                handle.remove()
            self.handles = [self._watch(self.last)]

    def _watch(self, parameter: Tensor) -> RemovableHandle:
        handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(self._ready)  # type: ignore[no-untyped-call]
        return handle

    def _ready(self, parameter: Tensor) -> None:
        if self.armed:
            self.last = parameter
            self.clock.lap("backward")


Wrap = Callable[[nn.Module, World, Clock, TrainSettings], Replica]


def _alone(module: nn.Module, world: World, clock: Clock, settings: TrainSettings) -> Replica:
    if world.size > 1:
        raise RefusedError(f"train.parallel: sync none runs on one rank, this job has {world.size}; set a sync")
    return Replica(module, clock)


def _late(kind: type[DataParallel]) -> Wrap:
    def wrap(module: nn.Module, world: World, clock: Clock, settings: TrainSettings) -> Replica:
        return LateReplica(kind(module, world.group, **options(settings)), clock)

    return wrap


def _overlapped(module: nn.Module, world: World, clock: Clock, settings: TrainSettings) -> Replica:
    return OverlappedReplica(OverlappedDDP(module, world.group, **options(settings)), clock)


def _bucketed(module: nn.Module, world: World, clock: Clock, settings: TrainSettings) -> Replica:
    size_mb = settings.bucket_size_mb
    return OverlappedReplica(BucketedDDP(module, world.group, bucket_size_mb=size_mb, **options(settings)), clock)


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
    return TorchReplica(wrapper, clock)


WRAP: Final[dict[Sync, Wrap]] = {
    "none": _alone,
    "gather_scatter": _late(GatherScatter),
    "allreduce": _late(AllReduce),
    "flat": _late(FlatAllReduce),
    "overlap": _overlapped,
    "bucketed": _bucketed,
    "ddp": _torch_ddp,
}


def needs_group(sync: Sync, world_size: int) -> bool:
    """True when a job of this sync must make a process group."""
    return sync != "none" or world_size > 1


def broadcast_buffers(module: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Overwrite every rank's buffers with rank 0's."""
    if group is not None:
        broadcast(list(module.buffers()), group)
