"""A model whose layers are split over ranks: each forwards and backwards its part of every layer.

    tensor rank 0   F B  step      both read the same batch, draw the same numbers where they have the same, and have
    tensor rank 1   F B  step      the same loss; their gradients are those of one process, of the part that each has

    data rank 0     | 0 1 |        ranks with the same part of other copies, 0 and 2, average its gradients as any
    data rank 1     | 2 3 |        data-parallel mode does, or share out its state by ZeRO (`inner`)

What tensor ranks have whole - norms, positions, some biases - has the same bits on all of them; one saves it and counts
it in norms. Everything else is a part, saved as a box of the whole (`tensor_state.py`).
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from muster.jobs.spec.train import TrainSettings
from muster.jobs.tensors.parts import HeldState
from muster.jobs.train.models.stack import Stack
from muster.jobs.train.modes import WRAP
from muster.jobs.train.numerics import Numerics
from muster.jobs.train.numerics.optim import gradients_of
from muster.jobs.train.profiling.clock import Clock
from muster.jobs.train.replica import Replica
from muster.jobs.train.sharded import ShardedReplica, shares_of
from muster.jobs.train.tensor_parts import Parts, groups_of, split_parts
from muster.jobs.train.tensor_state import TensorState
from muster.jobs.world.world import World


class TensorReplica(Replica):
    """One rank's part of every layer of a GPT, of which `inner` makes the mean over copies of the model."""

    def __init__(self, inner: Replica, parts: Parts, every: dist.ProcessGroup | None) -> None:
        super().__init__(inner.module, inner.world, inner.clock)
        self.inner = inner
        self.wrapper = getattr(inner, "wrapper", None)
        self.learns_from_first = inner.learns_from_first
        self.parts = parts
        self.shard_group = every if isinstance(inner, ShardedReplica) else parts.world.group

    # A step ---------------------------------------------------------------------------------------------------------

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Run the model; return its mean loss, the same on all tensor ranks."""
        return self.inner.forward(inputs, targets)

    def accumulating(self) -> AbstractContextManager[Any]:
        """Keep copies of the model from communicating; tensor ranks exchange activations in every micro-batch."""
        return self.inner.accumulating()

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradients of a micro-batch."""
        self.inner.backward(loss, last=last)

    def finish(self) -> None:
        """Make the gradients the mean over copies."""
        self.inner.finish()

    def gradients(self) -> list[Tensor]:
        """Return what of the mean gradients this rank steps with."""
        return self.inner.gradients()

    def counted(self) -> list[Tensor]:
        """Return the gradients that no other rank of `shard_group` counts."""
        if isinstance(self.inner, ShardedReplica):
            return shares_of(self.inner.wrapper, self.parts.answers)
        return gradients_of(each for name, each in self.module.named_parameters() if self.parts.answers(name))

    # What it is made of ---------------------------------------------------------------------------------------------

    def build_optimizer(self, numerics: Numerics, settings: TrainSettings) -> torch.optim.Optimizer:
        """Build what steps this rank's parameters."""
        return self.inner.build_optimizer(numerics, settings)

    def held(self, optimizer: torch.optim.Optimizer, more: Mapping[str, Tensor]) -> HeldState:
        """Return what of the state this rank saves and reads."""
        return TensorState(self.inner.held(optimizer, more), self.parts)

    def refresh(self) -> None:
        """Make use of state that has been written."""
        self.inner.refresh()

    def predict(self, inputs: Tensor) -> Tensor:
        """Run the model without gradients; all tensor ranks have the whole of what comes out."""
        return self.inner.predict(inputs)

    def full_gradients(self) -> dict[str, Tensor]:
        """Gather the gradients that the last step was made with."""
        return {name: self.parts.gather(name, each) for name, each in self.inner.full_gradients().items()}

    def full_parameters(self) -> dict[str, Tensor]:
        """Gather the parameters."""
        return {name: self.parts.gather(name, each) for name, each in self.inner.full_parameters().items()}


def split_layers(module: nn.Module, world: World, clock: Clock, settings: TrainSettings) -> Replica:
    """Split a model that every rank has built, in place: a collective.

    Raises:
        ValueError: it is no GPT, or its heads, d_ff or vocabulary cannot be split over so many ranks.
    """
    assert isinstance(module, Stack)
    groups = groups_of(world)
    assert groups is not None, "one rank has nobody to split layers with"
    parts = split_parts(module, world, groups, settings)
    data = replace(world, rank=world.data_rank, size=world.data_ranks, group=groups.data, tensor=1)
    return TensorReplica(WRAP[settings.sync](module, data, clock, settings), parts, groups.world)
