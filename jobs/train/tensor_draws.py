"""Dropout in one process with the same masks as on the tensor ranks of a split model, for `muster verify`.

Each tensor rank draws its own masks for its heads and its part of a sequence (`pipe/tensor/rng_streams.py`). Here one
process draws the masks of all ranks in turn, each from the same initial random state.

    heads       | rank 0 | rank 1 |       attention of each rank's heads separately, then concatenated
    tokens      | rank 0 | rank 1 |       dropout of each rank's tokens, if sequences are split
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor, nn

from muster.jobs.train.models.gpt import Attention, TransformerBlock
from muster.pipe.tensor.region import Region
from muster.pipe.tensor.rng_streams import OwnStream


def draw_as_split(model: nn.Module, ranks: int, *, sequence_parallel: bool) -> None:
    """Make a whole model draw the dropout masks of `ranks` tensor ranks, in place."""
    if ranks == 1:
        return
    places = [TensorRankRandom(rank) for rank in range(ranks)]
    for module in model.modules():
        if isinstance(module, Attention) and module.dropout > 0.0:
            module.mix = partial(in_turn, places, module, module.mix, 1)  # type: ignore[method-assign]
        if isinstance(module, TransformerBlock) and module.dropout.p > 0.0 and sequence_parallel:
            whole = module.dropout
            whole.forward = partial(in_turn, places, whole, whole.forward, 1)  # type: ignore[method-assign]


class TensorRankRandom:
    """The random numbers of one tensor rank, generated in this process."""

    def __init__(self, rank: int) -> None:
        region = Region(None)
        region.rank = rank
        self.draws = OwnStream(nn.Module(), region)


def in_turn(
    places: Sequence[TensorRankRandom], module: nn.Module, call: Callable[..., Tensor], dimension: int, *given: Tensor
) -> Tensor:
    """Call a function on each rank's part of the tensors, with the rank's random numbers; concatenate the results."""
    if not module.training:
        return call(*given)
    devices = [given[0].device] if given[0].is_cuda else []
    parts = [each.chunk(len(places), dimension) for each in given]
    made = []
    for place, own in zip(places, zip(*parts, strict=True), strict=True):
        # Every rank begins from the same random state. Training continues with the state after the last rank.
        last = place is places[-1]
        with nullcontext() if last else torch.random.fork_rng(devices=devices):
            place.draws.begin(module, own)
            made.append(call(*own))
            place.draws.end(module, own, None)
    return torch.cat(made, dimension)
