"""One rank's copy of its layers, and the averaging of gradients over the ranks with the same layers.

shard 0   F B  F B |  shard 1   F B  F B |          every backward but the last only accumulates
                   next_shard            finish      a late replica averages here
                                      ^-- an overlapped one in the last backward

Gradients, parameters and optimizer state are whole on every such rank, or sharded (`is_sharded`). Methods that return
them whole, for comparison or evaluation, are collectives.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from muster.ddp.base import DataParallel
from muster.jobs.spec.recorded import records
from muster.jobs.train.numerics import Numerics
from muster.jobs.train.numerics.optim import gradients_of, named_gradients
from muster.jobs.train.profiling.clock import StepMarks
from muster.jobs.world.world import World
from muster.zero.flat import ParameterRange

if TYPE_CHECKING:
    from muster.jobs.spec.train import TrainSettings


class Replica:
    """A replica of layers that no other rank has, so nothing is averaged. `world` lists the ranks with the layers."""

    learns_from_first = False  # True: the first backward determines the order of sums in later ones
    is_sharded = False  # True: gradients and optimizer state are sharded over these ranks
    wrapper: nn.Module | None = None
    not_timed = ""  # the reason if a timeline lacks this replica's collectives

    def __init__(self, module: nn.Module, world: World, clock: StepMarks) -> None:
        self.module = module
        self.world = world
        self.clock = clock
        self._parameters: list[nn.Parameter] | None = None

    # A step ---------------------------------------------------------------------------------------------------------

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Run the model; return its mean loss."""
        loss: Tensor = self.module(inputs, targets)
        return loss

    def accumulating(self) -> AbstractContextManager[Any]:
        """Return the context for all micro-batches but a rank's last: their gradients only accumulate."""
        return nullcontext()

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradients of a micro-batch; `last` marks the rank's last micro-batch of the step."""
        torch.autograd.backward(loss)
        self.clock.lap("backward")

    def next_shard(self) -> None:
        """Switch from one virtual rank to the next."""

    def finish(self) -> None:
        """Average the gradients over all virtual ranks."""

    def gradients(self) -> list[Tensor]:
        """Return this rank's part of the mean gradients, to be changed in place before the step."""
        if self._parameters is None:  # listing them takes a millisecond in a model with a hundred layers
            self._parameters = list(self.module.parameters())
        return gradients_of(self._parameters)

    def counted(self, chosen: Callable[[str], bool]) -> list[Tensor]:
        """Return the gradients of the parameters whose names satisfy `chosen`."""
        return gradients_of(each for name, each in self.module.named_parameters() if chosen(name))

    # Optimizer and state --------------------------------------------------------------------------------------------

    def build_optimizer(self, numerics: Numerics, settings: "TrainSettings") -> torch.optim.Optimizer:
        """Build the optimizer of this rank's parameters."""
        # A pipeline records actions, not whole steps.
        capturable = records(settings, self.world.device.type) and not settings.is_pipeline
        return numerics.optimizer(self.module.parameters(), settings.optimizer, capturable=capturable)

    def ranges(self, optimizer: torch.optim.Optimizer) -> Sequence[ParameterRange] | None:
        """List this rank's ranges of the state; None means that it has every tensor whole."""
        return None

    def prepare_recording(self) -> None:
        """Prepare for steps that are recorded as CUDA graphs."""

    def stepped(self) -> None:
        """Record that a replayed graph has changed gradients and parameters."""

    def abandon(self) -> None:
        """Forget what a recording that failed has left behind."""

    def settle(self) -> None:
        """Wait until all parameters have been updated by the last step."""

    def refresh(self) -> None:
        """Apply state that was loaded from a checkpoint: a collective."""

    def predict(self, inputs: Tensor) -> Tensor:
        """Run the model without gradients. All ranks must call this equally often."""
        outputs: Tensor = self.module(inputs)
        return outputs

    def full_gradients(self) -> dict[str, Tensor]:
        """Copy the whole gradients of the last step, by parameter name: a collective."""
        return named_gradients(self.module)

    def full_parameters(self) -> dict[str, Tensor]:
        """Copy the whole parameters, by name: a collective."""
        return {name: each.detach().clone() for name, each in self.module.named_parameters()}


class WrappedReplica(Replica):
    """A copy inside a data-parallel wrapper, whose communication `no_sync()` suspends."""

    wrapper: DataParallel | DistributedDataParallel

    def __init__(self, wrapper: DataParallel | DistributedDataParallel, world: World, clock: StepMarks) -> None:
        super().__init__(wrapper.module, world, clock)
        self.wrapper = wrapper

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Run the model through the wrapper."""
        loss: Tensor = self.wrapper(inputs, targets)
        return loss

    def accumulating(self) -> AbstractContextManager[Any]:
        """Return a context in which the wrapper does not communicate."""
        return self.wrapper.no_sync()

    def abandon(self) -> None:
        """Forget the collectives of a recording that failed. A wait for one of them raises, but they never ran."""
        with suppress(RuntimeError):
            self.wrapper.zero_grad()
        self.wrapper.zero_grad()

    def next_shard(self) -> None:
        """Keep the gradients of the previous virtual rank separate, so that they are summed in order."""
        assert isinstance(self.wrapper, DataParallel), "PyTorch's wrapper guarantees no order of sums"
        self.wrapper.next_shard()
        self.clock.lap("backward")


class LateReplica(WrappedReplica):
    """A copy whose gradients are averaged after the backward, so that all communication is exposed."""

    def finish(self) -> None:
        """Average the gradients."""
        assert isinstance(self.wrapper, DataParallel)
        self.wrapper.finish_gradient_synchronization()
        self.clock.lap("communication")


class OverlappedReplica(WrappedReplica):
    """A copy whose gradients are averaged during the last backward, so that only the rest of the wait is exposed."""

    def __init__(self, wrapper: DataParallel | DistributedDataParallel, world: World, clock: StepMarks) -> None:
        super().__init__(wrapper, world, clock)
        self.ready = LastGradient(wrapper.module, clock)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradients of a micro-batch. After the last one they are averaged."""
        if not last:
            super().backward(loss, last=last)
            return
        with self.ready:
            torch.autograd.backward(loss)
        self.clock.lap("communication")


class TorchReplica(OverlappedReplica):
    """A copy inside PyTorch's DistributedDataParallel.

    The wrapper rebuilds its buckets after the first backward. The position of a gradient in a bucket determines the
    order in which more than two ranks sum it.
    """

    learns_from_first = True
    not_timed = "PyTorch's DistributedDataParallel launches its buckets in C++"


class LastGradient:
    """A context that marks the end of the backward, when the last gradient becomes ready.

    The first backward watches all parameters to learn which one is last; later ones watch only that one.
    """

    def __init__(self, module: nn.Module, clock: StepMarks) -> None:
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
