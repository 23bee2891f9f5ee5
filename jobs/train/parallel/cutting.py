"""Decide where a model is cut into stages, and sequences into slices.

stage 0              stage 1          stage 2                   tied: head.weight is embed.token.weight
embed block1 block2  block3 block4    block5 norm head
gradient of embed's use ─────────── + ─────────── of head's     both ranks get the sum and make the same update
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from muster.jobs.basics.errors import RefusedError
from muster.jobs.models.anatomy import anatomy, layer_weight
from muster.jobs.models.shapes import GptShape
from muster.jobs.spec.expand import first_layers
from muster.jobs.spec.modes import Parallel
from muster.jobs.train.models.stack import LayerStack
from muster.jobs.world.world import World
from muster.pipe.boundaries import By, weights_of
from muster.pipe.schedules.cuts import Cuts, balanced_ranks, by_hand
from muster.pipe.token_slices import equal_slices

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
            weights += weights.new_tensor(_weights(model, settings.cut, inputs))
        if settings.cut == "profile" and world.group is not None:
            dist.broadcast(weights, 0, group=world.group)
        return balanced_ranks(weights.tolist(), rank_of)
    except ValueError as error:
        raise RefusedError(f"train.cut: {error}") from error


def _weights(model: LayerStack, by: By, inputs: Sequence[int]) -> list[float]:
    """Return the weight of every layer.

    The operations of Muster's own models are in a table, which `plan` reads, too. On the meta device, counting them
    would import PyTorch's compiler: 2 s of CPU time.
    """
    shape = model.shape
    if by != "flops" or shape is None:
        return weights_of(model, by, inputs)
    if isinstance(shape, GptShape):
        shape = replace(shape, context=inputs[1])
    parts = dict(anatomy(shape).layers())
    return [inputs[0] * layer_weight(by, parts.get(name, ())) for name, _ in model.named_children()]


def tokens_of(settings: "TrainSettings", split: Parallel, length: int) -> tuple[int, ...]:
    """Return the lengths of the slices of a sequence of `length` tokens; none if the schedule does not slice."""
    if split.schedule != "terapipe":
        return ()
    given = None if settings.parallel is None else settings.parallel.tokens
    return equal_slices(length) if given is None else tuple(given)
