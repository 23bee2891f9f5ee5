"""Which part of every layer a rank has, and the groups that it talks in.

whole         names, types and shapes of the model's tensors: what checkpoints know
local         of this rank's parts of them
slices        where each part lies in the whole; nothing where layers are not split
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Final

import torch
from torch import Tensor, nn

from muster.jobs.spec.train import TrainSettings
from muster.jobs.train.models.stack import Stack
from muster.jobs.train.models.tensor_plan import split_gpt
from muster.jobs.train.shards import Forms
from muster.jobs.world.world import COLLECTIVE_TIMEOUT_S, World
from muster.pipe.mesh import Groups, Mesh
from muster.pipe.tensor.slices import TensorSlice

TIMEOUT: Final = timedelta(seconds=COLLECTIVE_TIMEOUT_S)


@dataclass(frozen=True)
class Parts:
    """Which part of every tensor of a model this rank has: `whole` are the model's forms before it was split.

    `world` is that of the tensor ranks, which have all parts together; `local` are the forms of the parts.
    """

    whole: Forms
    local: Forms
    slices: Mapping[str, TensorSlice]
    world: World

    def slice_of(self, name: str) -> TensorSlice | None:
        """Return where a parameter lies, by any of its names; None for what is no parameter."""
        return self.slices.get(self.whole.aliases.get(name, name))

    def answers(self, name: str) -> bool:
        """True when this rank speaks for its part of a parameter among the tensor ranks."""
        cut = self.slice_of(name)
        return self.world.rank == 0 if cut is None else cut.answers

    def gather(self, name: str, part: Tensor) -> Tensor:
        """Put the ranks' parts of something like a parameter together: a collective of the tensor ranks."""
        cut = self.slice_of(name)
        if cut is None or cut.dimension is None:
            return part
        return torch.cat(self.world.gather(part.contiguous()), cut.dimension)


def whole_model(module: nn.Module, world: World) -> Parts:
    """Return the parts of a rank that has every layer whole."""
    forms = Forms(module)
    return Parts(forms, forms, {}, replace(world, rank=0, size=1, group=None, pipe=1, tensor=1))


def groups_of(world: World) -> Groups | None:
    """Make a rank's groups: a collective of all ranks; None where there is only one."""
    if world.group is None:
        return None
    return Mesh(world.data_ranks, world.pipe, world.tensor).groups(world.group, TIMEOUT)


def split_parts(module: Stack, world: World, groups: Groups | None, settings: TrainSettings) -> Parts:
    """Split a model's layers over the tensor ranks, in place, and say what of it this rank has: a collective.

    Raises:
        ValueError: it is no GPT, or its heads, d_ff or vocabulary cannot be split over so many ranks.
    """
    if groups is None or world.tensor == 1:
        return whole_model(module, world)
    whole = Forms(module)
    split = split_gpt(module, groups.tensor, sequence_parallel=settings.sequence_parallel)
    along = replace(world, rank=world.tensor_rank, size=world.tensor, group=groups.tensor, pipe=1, tensor=1)
    return Parts(whole, Forms(module), split.slices, along)
