"""The parts of a model's layers on one tensor rank.

    tensor rank 0   F B  step      both read the same batch, use the same random numbers for tensors that both have, and
    tensor rank 1   F B  step      get the same loss; each has the gradients of one process, restricted to its part

whole         names, dtypes and shapes of the model's tensors, as in checkpoints
local         names, dtypes and shapes of this rank's parts
slices        the position of each part in the whole; empty if layers are not split

A checkpoint does not depend on tensor ranks: each part is stored as a piece of a whole tensor.

up (32, 16), split along 0      rank 1 of 2: one range of row-major elements        [flat 256:512]
down (16, 32), split along 1    rank 1 of 2: a box                                  [0:16,16:32]
a flat range of that box        as cut by ZeRO: at most three boxes of a matrix     [3:4,20:32] [4:9,16:32] [9:10,16:17]

Tensors that are not split (norms, positions, some biases) have the same bits on every tensor rank. The first rank saves
them and counts them in gradient norms. A scalar for a whole parameter, such as a step count, is saved by the rank
with the parameter's first element.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from muster.jobs.checkpoint.pieces import Piece
from muster.jobs.tensors.parts import DTYPES, TensorPart
from muster.jobs.train.models.stack import LayerStack
from muster.jobs.train.models.tensor_plan import split_gpt, split_made
from muster.jobs.train.parallel.forms import Forms, parameter_of
from muster.jobs.train.profiling.clock import StepMarks
from muster.jobs.world.world import World
from muster.pipe.mesh import Groups
from muster.pipe.tensor.slices import TensorSlice

if TYPE_CHECKING:
    from muster.jobs.spec.train import TrainSettings


@dataclass(frozen=True)
class Parts:
    """This rank's part of every tensor of a model.

    `whole` has the forms of the tensors before the split, `local` those of the parts. `world` consists of the tensor
    ranks, which together have all parts.
    """

    whole: Forms
    local: Forms
    slices: Mapping[str, TensorSlice]
    world: World

    def slice_of(self, name: str) -> TensorSlice | None:
        """Return the slice of the parameter with this name or alias; None for buffers and layers that are not split."""
        return self.slices.get(self.whole.aliases.get(name, name))

    def answers(self, name: str) -> bool:
        """Return True if this tensor rank saves its part of a parameter and counts it in gradient norms."""
        cut = self.slice_of(name)
        return self.world.rank == 0 if cut is None else cut.answers

    def gather(self, name: str, part: Tensor) -> Tensor:
        """Join the parts of a parameter, or of a tensor of its shape: a collective of the tensor ranks."""
        cut = self.slice_of(name)
        if cut is None or cut.dimension is None:
            return part
        return torch.cat(self.world.gather(part.contiguous()), cut.dimension)

    def local_piece(self, piece: Piece) -> Piece:
        """Return a stored piece with the shape of this rank's part."""
        cut = self.slice_of(parameter_of(piece.name))
        return piece if cut is None or piece.shape != cut.shape else replace(piece, shape=cut.local_shape)

    def placed(self, part: TensorPart, *, answering: bool) -> list[TensorPart]:
        """Convert this rank's part to parts of the whole model; with `answering`, only those that this rank saves."""
        cut = self.slice_of(parameter_of(part.piece.name))
        if cut is None:
            return [part] if self.world.rank == 0 or not answering else []
        if part.piece.shape != cut.local_shape:
            return [part] if cut.has_first or not answering else []
        if answering and not cut.answers:
            return []
        return parts_of(part.piece.name, cut, part.tensor, part.piece.flat[0] if part.piece.flat else 0)


def whole_layers(whole: Forms, world: World) -> Parts:
    """Return the `Parts` of a rank whose layers are not split."""
    return Parts(whole, whole, {}, replace(world, rank=0, size=1, group=None, pipe=1, tensor=1, check=None))


def split_layers(
    module: nn.Module, whole: Forms, world: World, groups: Groups, settings: "TrainSettings", clock: StepMarks
) -> Parts:
    """Split a model's layers over the tensor ranks, in place; return the parts of this rank. A collective.

    Raises:
        ValueError: if the layers cannot be split over this many ranks.
    """
    if isinstance(module, LayerStack) and settings.model.make is None:
        split = split_gpt(module, groups.tensor, sequence_parallel=settings.sequence_parallel)
    else:
        split = split_made(module, settings, groups.tensor)
    split.region.on_wait = clock.wait
    along = replace(world, rank=world.tensor_rank, size=world.tensor, group=groups.tensor, pipe=1, tensor=1, check=None)
    return Parts(whole, Forms(module), split.slices, along)


def parts_of(name: str, cut: TensorSlice, tensor: Tensor, start: int = 0) -> list[TensorPart]:
    """Return a range of this rank's part, from element `start` in row-major order, as parts of the whole.

    `name` is the name in a checkpoint ("model/...", "optimizer/..."). `tensor` contains the range, either flat or in
    the part's shape.

    Raises:
        ValueError: if the range exceeds this rank's part.
    """
    dtype, flat = DTYPES[tensor.dtype], tensor.detach().view(-1)
    stop = start + flat.numel()
    if cut.dimension is None and (start, stop) == (0, math.prod(cut.shape)):
        return [TensorPart(Piece(name, dtype, cut.shape), flat.view(cut.shape))]
    boxes = cut.boxes(start, stop)
    if cut.offset is not None:
        return [TensorPart(Piece(name, dtype, cut.shape, flat=(cut.offset + start, cut.offset + stop)), flat)]
    pieces = [(begin - start, end - start, Piece(name, dtype, cut.shape, box=box)) for (begin, end), box in boxes]
    return [TensorPart(piece, flat[begin:end].view(piece.extent)) for begin, end, piece in pieces]
