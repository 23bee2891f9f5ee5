"""How one rank holds the layers that it has, and how their gradients become the mean over the ranks that have the same.

shard 0   F B  F B |  shard 1   F B  F B |          every backward but the last only accumulates
                   next_shard            finish      a late replica averages here
                                      ^-- an overlapped one in the last backward

Gradients, parameters and the optimizer's state are whole on every such rank, or shared out (`shares_out`). What is
asked for whole - to compare it, to evaluate - is a collective.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from muster.ddp.base import DataParallel
from muster.jobs.train.numerics import Numerics
from muster.jobs.train.numerics.optim import gradients_of, named_gradients
from muster.jobs.train.profiling.clock import Clock
from muster.jobs.world.world import World
from muster.zero.flat import Held

if TYPE_CHECKING:
    from muster.jobs.spec.train import TrainSettings


class Replica:
    """Layers that no other rank has, so nothing is synchronized. `world`: the ranks with the same layers."""

    learns_from_first = False  # True: the first backward decides in which order the later ones sum
    shares_out = False  # True: these ranks have one gradient together
    wrapper: nn.Module | None = None
    not_timed = ""  # why a timeline lacks this replica's collectives, if it does

    def __init__(self, module: nn.Module, world: World, clock: Clock) -> None:
        self.module = module
        self.world = world
        self.clock = clock

    # A step ---------------------------------------------------------------------------------------------------------

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

    def gradients(self) -> list[Tensor]:
        """Return what of the mean gradients this rank steps with, to be changed in place."""
        return gradients_of(self.module.parameters())

    def counted(self, chosen: Callable[[str], bool]) -> list[Tensor]:
        """Return the gradients of the parameters whose names are chosen."""
        return gradients_of(each for name, each in self.module.named_parameters() if chosen(name))

    # What it is made of ---------------------------------------------------------------------------------------------

    def build_optimizer(self, numerics: Numerics, settings: "TrainSettings") -> torch.optim.Optimizer:
        """Build what steps this rank's parameters."""
        capturable = settings.cuda_graph and not settings.is_pipeline  # whose graphs are of actions, not of steps
        return numerics.optimizer(self.module.parameters(), settings.optimizer, capturable=capturable)

    def ranges(self, optimizer: torch.optim.Optimizer) -> Sequence[Held] | None:
        """List the ranges of the state that this rank holds; None: it holds every tensor whole."""
        return None

    def settle(self) -> None:
        """Wait until the parameters have the values of the last step."""

    def refresh(self) -> None:
        """Take over state that was read from a checkpoint: a collective."""

    def predict(self, inputs: Tensor) -> Tensor:
        """Run the model without gradients: every rank as often."""
        outputs: Tensor = self.module(inputs)
        return outputs

    def full_gradients(self) -> dict[str, Tensor]:
        """Copy the gradients that the last step was made with, whole, by name of parameter: a collective."""
        return named_gradients(self.module)

    def full_parameters(self) -> dict[str, Tensor]:
        """Copy the parameters, whole, by name: a collective."""
        return {name: each.detach().clone() for name, each in self.module.named_parameters()}


class WrappedReplica(Replica):
    """A copy inside a wrapper, which keeps gradients on this rank while it is asked to."""

    wrapper: DataParallel | DistributedDataParallel

    def __init__(self, wrapper: DataParallel | DistributedDataParallel, world: World, clock: Clock) -> None:
        super().__init__(wrapper.module, world, clock)
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

    def __init__(self, wrapper: DataParallel | DistributedDataParallel, world: World, clock: Clock) -> None:
        super().__init__(wrapper, world, clock)
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
    not_timed = "PyTorch's DistributedDataParallel launches its buckets in C++"


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
