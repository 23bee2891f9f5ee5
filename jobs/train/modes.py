"""The rank side of `jobs/modes.py`: how a `sync` wraps a model, as a table. The engine sees only a `Replica`."""

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from ddp import AllReduce, GatherScatter
from ddp.base import DataParallel, broadcast
from jobs.errors import RefusedError
from jobs.modes import Sync
from jobs.train.clock import Clock
from jobs.train.world import World


class Replica:
    """One rank's copy of the model, alone: nothing is synchronized."""

    learns_from_first = False  # True: the first backward decides in which order the later ones sum

    def __init__(self, module: nn.Module, clock: Clock) -> None:
        self.module = module
        self.clock = clock

    def forward(self, inputs: Tensor) -> Tensor:
        """Run the model."""
        outputs: Tensor = self.module(inputs)
        return outputs

    def accumulating(self) -> AbstractContextManager[Any]:
        """Return the context of every micro-batch but a rank's last: its gradients only accumulate."""
        return nullcontext()

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradients of a micro-batch; `last` is the rank's last one of the step."""
        torch.autograd.backward(loss)
        self.clock.lap("backward")

    def end_shard(self) -> None:
        """Close a virtual rank's part."""

    def finish(self) -> None:
        """Make the gradients the mean over all virtual ranks."""


class WrappedReplica(Replica):
    """A copy inside one of our own wrappers; with `ordered`, gradients are summed in the order of virtual ranks."""

    def __init__(self, wrapper: DataParallel, clock: Clock, *, ordered: bool) -> None:
        super().__init__(wrapper.module, clock)
        self.wrapper = wrapper
        self.ordered = ordered

    def end_shard(self) -> None:
        """Keep the virtual rank's gradients apart when the order of the sum is promised."""
        if self.ordered:
            self.wrapper.next_shard()

    def finish(self) -> None:
        """Average the gradients; all of the wait is exposed."""
        self.wrapper.finish_gradient_synchronization()
        self.clock.lap("communication")


class TorchReplica(Replica):
    """A copy inside PyTorch's DistributedDataParallel, which communicates during the last backward.

    It deals gradients anew to its buckets after the first backward, and where a gradient lies in a bucket decides in
    which order more than two ranks add it up.
    """

    learns_from_first = True

    def __init__(self, wrapper: DistributedDataParallel, clock: Clock) -> None:
        super().__init__(wrapper.module, clock)
        self.wrapper = wrapper
        self.ready = LastGradient(wrapper.module, clock)

    def forward(self, inputs: Tensor) -> Tensor:
        """Run the model through the wrapper, which prepares its buckets."""
        outputs: Tensor = self.wrapper(inputs)
        return outputs

    def accumulating(self) -> AbstractContextManager[Any]:
        """Keep the wrapper from communicating."""
        return self.wrapper.no_sync()

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add gradients; in the last micro-batch the time after the last ready gradient is exposed wait."""
        if not last:
            super().backward(loss, last=last)
            return
        with self.ready:
            torch.autograd.backward(loss)
        self.clock.lap("communication")


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


def _alone(module: nn.Module, world: World, clock: Clock, ordered: bool) -> Replica:
    if world.size > 1:
        raise RefusedError(f"train.parallel: sync none runs on one rank, this job has {world.size}; set a sync")
    return Replica(module, clock)


def _gather_scatter(module: nn.Module, world: World, clock: Clock, ordered: bool) -> Replica:
    return WrappedReplica(GatherScatter(module, world.group), clock, ordered=ordered)


def _allreduce(module: nn.Module, world: World, clock: Clock, ordered: bool) -> Replica:
    return WrappedReplica(AllReduce(module, world.group), clock, ordered=ordered)


def _torch_ddp(module: nn.Module, world: World, clock: Clock, ordered: bool) -> Replica:
    # torch 2.13 renamed the switch and warns about the old name.
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    switch = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    broadcast(list(module.buffers()), world.group)  # with the old name the wrapper leaves buffers as they are
    options: dict[str, Any] = {switch: False}
    device_ids = [world.device.index] if world.device.type == "cuda" else None
    wrapper = DistributedDataParallel(
        module, device_ids=device_ids, process_group=world.group, gradient_as_bucket_view=True, **options
    )
    return TorchReplica(wrapper, clock)


WRAP: Final[dict[Sync, Callable[[nn.Module, World, Clock, bool], Replica]]] = {
    "none": _alone,
    "gather_scatter": _gather_scatter,
    "allreduce": _allreduce,
    "ddp": _torch_ddp,
}


def needs_group(sync: Sync, world_size: int) -> bool:
    """True when a job of this sync must make a process group."""
    return sync != "none" or world_size > 1


def broadcast_buffers(module: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Overwrite every rank's buffers with rank 0's."""
    if group is not None:
        broadcast(list(module.buffers()), group)
