"""Decide where a model is cut into stages, and sequences into slices.

stage 0              stage 1          stage 2                   tied: head.weight is embed.token.weight
embed block1 block2  block3 block4    block5 norm head
gradient of embed's use ─────────── + ─────────── of head's     both ranks get the sum and make the same update
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from muster.jobs.basics.errors import RefusedError
from muster.jobs.spec.expand import first_layers
from muster.jobs.spec.modes import Parallel
from muster.jobs.train.models.gpt import TransformerBlock
from muster.jobs.train.models.stack import LayerStack
from muster.jobs.world.world import World
from muster.pipe.boundaries import weights_of
from muster.pipe.schedules.cuts import Cuts, balanced_ranks, by_hand
from muster.pipe.schedules.slicing import SliceTimes, best_slices
from muster.pipe.slice_times import slice_times

if TYPE_CHECKING:
    from muster.jobs.spec.train import TrainSettings


def cuts_of(
    settings: "TrainSettings", model: LayerStack, rank_of: Sequence[int], inputs: Sequence[int], world: World
) -> Cuts:
    """Cut a model into stages according to the job, the same on every rank: a collective if layers are timed.

    `inputs` is the shape of a micro-batch's inputs.

    Raises:
        RefusedError: if the model cannot be cut as the job says.
    """
    names = [name for name, _ in model.named_children()]
    try:
        if not isinstance(settings.cut, str):
            return by_hand(first_layers(settings.cut, names), len(names), len(rank_of))
        weights = torch.zeros(len(names), dtype=torch.float64, device=world.device)
        if settings.cut != "profile" or world.rank == 0:
            weights += weights.new_tensor(weights_of(model, settings.cut, inputs))
        if settings.cut == "profile" and world.group is not None:
            dist.broadcast(weights, 0, group=world.group)
        return balanced_ranks(weights.tolist(), rank_of)
    except ValueError as error:
        raise RefusedError(f"train.cut: {error}") from error


def tokens_of(
    settings: "TrainSettings", model: LayerStack, split: Parallel, cuts: Cuts, inputs: Sequence[int], world: World
) -> tuple[int, ...]:
    """Return the lengths of the slices of a sequence; none if the schedule does not slice. A collective if measured.

    `auto` measures one block on rank 0, and chooses the fastest slices for the stage with the most blocks. It assumes
    that messages take no time, and that every rank has a processor or GPU of its own.
    """
    if split.schedule != "terapipe":
        return ()
    if settings.parallel is not None and settings.parallel.tokens != "auto":
        return tuple(settings.parallel.tokens)
    layers, found = list(model), torch.zeros(3, dtype=torch.float64, device=world.device)
    if world.rank == 0:
        block = next(each for each in layers if isinstance(each, TransformerBlock))
        weight = next(block.parameters())
        width = block.attention.query.in_features
        x = torch.randn(*inputs, width, dtype=weight.dtype, device=weight.device, generator=_generator(weight))
        times = slice_times(nn.Sequential(block), x)
        blocks = [sum(isinstance(each, TransformerBlock) for each in layers[i:j]) for i, j in pairwise((*cuts, None))]
        found += found.new_tensor([times.fixed, times.per_token, times.per_pair]) * max(blocks)
    if world.group is not None:
        dist.broadcast(found, 0, group=world.group)
    return best_slices(inputs[1], split.pipe, split.microbatches, SliceTimes(*found.tolist()))


def _generator(like: torch.Tensor) -> torch.Generator:
    return torch.Generator(like.device).manual_seed(0)  # a separate generator leaves the job's random numbers unchanged
