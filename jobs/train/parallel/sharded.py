"""Layers with sharded state: modes zero1, zero2 and zero3, by the `zero` library."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from muster.jobs.spec.recorded import records
from muster.jobs.train.numerics import Numerics
from muster.jobs.train.numerics.optim import make_state, quiet, recipe
from muster.jobs.train.parallel.replica import WrappedReplica
from muster.jobs.train.profiling.clock import StepMarks
from muster.jobs.world.world import World
from muster.zero import ShardedDataParallel, ShardedOptimizer
from muster.zero.flat import ParameterRange

if TYPE_CHECKING:
    from muster.jobs.spec.train import TrainSettings


class ShardedReplica(WrappedReplica):
    """A copy inside `zero`'s wrapper.

    Gradients are scattered in the last backward, and parameters are gathered where they are used, so `finish` has
    nothing to do. With `marks_waits`, waits within forward and backward count as communication.
    """

    wrapper: ShardedDataParallel
    optimizer: ShardedOptimizer
    is_sharded = True

    def __init__(
        self, wrapper: ShardedDataParallel, world: World, clock: StepMarks, *, marks_waits: bool = True
    ) -> None:
        super().__init__(wrapper, world, clock)
        if marks_waits:
            wrapper.on_wait = clock.wait

    def gradients(self) -> list[Tensor]:
        """Return this rank's share of the mean gradients."""
        self.clock.phase = "optimizer"
        return self.optimizer.gradients()

    def build_optimizer(self, numerics: Numerics, settings: "TrainSettings") -> torch.optim.Optimizer:
        """Build the optimizer of this rank's share; 16-bit parameters get float32 copies."""
        trainable = [each for each in self.module.parameters() if each.requires_grad]
        capturable = records(settings, self.world.device.type) and not settings.is_pipeline
        kind, options = recipe(trainable, settings.optimizer, cut_anywhere=numerics.cut_anywhere, capturable=capturable)
        self.optimizer = self.wrapper.optimizer(kind, masters=True, **options)
        make_state(self.optimizer.inner, settings.optimizer)
        quiet(self.optimizer.inner)
        return self.optimizer

    def counted(self, chosen: Callable[[str], bool]) -> list[Tensor]:
        """Return this rank's ranges of the gradients of the chosen parameters."""
        return [
            flat_parameter.of(flat_parameter.grad, at)
            for flat_parameter in self.wrapper.flat_parameters
            if flat_parameter.grad is not None
            for at in flat_parameter.slices
            if chosen(flat_parameter.names[at.tensor])
        ]

    def ranges(self, optimizer: torch.optim.Optimizer) -> Sequence[ParameterRange]:
        """List this rank's share of the state."""
        return [*self.wrapper.held_parameters(), *self.optimizer.held_state()]

    def prepare_recording(self) -> None:
        """Gather parameters when the next forward begins, so that a graph of one step contains the gathers."""
        self.wrapper.gather_late()

    def stepped(self) -> None:
        """Record that a replayed graph has stepped the shards."""
        self.wrapper.shards_changed()

    def abandon(self) -> None:
        """Forget the collectives of a recording that failed, and gather the parameters again."""
        super().abandon()
        self.wrapper.shards_changed()

    def settle(self) -> None:
        """Wait for parameters that are being gathered."""
        self.wrapper.synchronize()

    def refresh(self) -> None:
        """Gather the parameters from their loaded shares; for 16-bit parameters, from the float32 copies."""
        self.wrapper.refresh(masters=True)

    def predict(self, inputs: Tensor) -> Tensor:
        """Run the model without gradients. Parameters stay sharded, because they may not fit in one rank's memory."""
        outputs: Tensor = self.wrapper(inputs)
        return outputs

    def full_gradients(self) -> dict[str, Tensor]:
        """Gather the gradients."""
        found = self.wrapper.full_gradients()
        if not self.wrapper.unused:
            return found
        with self.wrapper.gather_full():
            named = self.module.named_parameters()
            return {name: found.get(name, torch.zeros_like(each)) for name, each in named if each.requires_grad}

    def full_parameters(self) -> dict[str, Tensor]:
        """Gather the parameters."""
        with self.wrapper.gather_full():
            return super().full_parameters()
