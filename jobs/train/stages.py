"""Which layers each rank of a pipeline has: the cuts, what of the whole model is where, and weights that two share.

stage 0              stage 1          stage 2                   tied: head.weight is embed.token.weight
embed block1 block2  block3 block4    block5 norm head
gradient of embed's use ─────────── + ─────────── of head's     both ranks have the sum, and step alike
"""

from collections.abc import Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from muster.jobs.basics.errors import RefusedError
from muster.jobs.checkpoint.pieces import Piece
from muster.jobs.models.model_shape import context_of
from muster.jobs.models.shapes import IMAGE_CHANNELS
from muster.jobs.spec.expand import first_layers
from muster.jobs.spec.train import TrainSettings
from muster.jobs.spec.train_fields import ModelSettings
from muster.jobs.tensors.parts import DTYPES
from muster.jobs.train.models.stack import Stack
from muster.jobs.train.numerics import Numerics
from muster.jobs.world.world import World
from muster.pipe.boundaries import weights_of
from muster.pipe.schedules.cuts import Cuts, balanced_ranks, by_hand

IMAGE_SIDE = 32
TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


def cuts_of(settings: TrainSettings, model: Stack, rank_of: Sequence[int], samples: int, world: World) -> Cuts:
    """Cut a model into stages as the job says, the same on every rank: a collective where layers are timed.

    `samples` are those of a micro-batch.

    Raises:
        RefusedError: it cannot be cut so.
    """
    names = [name for name, _ in model.named_children()]
    try:
        if not isinstance(settings.cut, str):
            return by_hand(first_layers(settings.cut, names), len(names), len(rank_of))
        weights = torch.zeros(len(names), dtype=torch.float64, device=world.device)
        if settings.cut != "profile" or world.rank == 0:
            weights += weights.new_tensor(weights_of(model, settings.cut, input_size(settings.model, samples)))
        if settings.cut == "profile" and world.group is not None:
            dist.broadcast(weights, 0, group=world.group)
        return balanced_ranks(weights.tolist(), rank_of)
    except ValueError as error:
        raise RefusedError(f"train.cut: {error}") from error


def input_size(model: ModelSettings, samples: int) -> tuple[int, ...]:
    """Return the shape of a model's inputs."""
    return (samples, IMAGE_CHANNELS, IMAGE_SIDE, IMAGE_SIDE) if model.is_vgg else (samples, context_of(model))


def in_autocast(model: Stack, numerics: Numerics) -> None:
    """Let every layer compute as autocast says by itself: a backward runs between the forwards of a pipeline."""
    if numerics.autocast is None:
        return
    for layer in model:
        layer.forward = partial(_cast, numerics, layer)


def _cast(numerics: Numerics, layer: nn.Module, x: Tensor) -> Tensor:
    with numerics.forward():
        y: Tensor = type(layer).forward(layer, x)  # looked up now: what splits a layer's backward changes its class
    return y


class Places:
    """What of a model is on which rank of a pipeline."""

    def __init__(self, model: Stack, cuts: Cuts, rank_of: Sequence[int], world: World) -> None:
        self.world = world
        stages = [sum(number >= cut for cut in cuts) - 1 for number in range(len(model))]
        self.rank_of = {name: rank_of[stage] for (name, _), stage in zip(model.named_children(), stages, strict=True)}

    def rank(self, name: str) -> int:
        """Return the rank of the pipeline that has a parameter or buffer."""
        return self.rank_of[name.partition(".")[0]]

    def broadcast(self, name: str, own: Mapping[str, Tensor], piece: Piece, group: dist.ProcessGroup | None) -> Tensor:
        """Return a copy of what the rank that has a tensor finds in its `own`: a collective of the pipeline."""
        source = self.world.rank_at(self.rank(name))
        if self.world.rank == source:
            tensor = own[name].detach().clone()
        else:
            tensor = torch.empty(piece.shape, dtype=TORCH_DTYPES[piece.dtype], device=self.world.device)
        if group is not None:
            dist.broadcast(tensor, source, group=group)
        return tensor
