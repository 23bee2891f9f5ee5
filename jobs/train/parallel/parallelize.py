"""Split a model over ranks: `parallelize` applies one kind of parallelism after the other.

{data: 2, pipe: 2, tensor: 2, zero: 1}        8 ranks; this one:

tensor   a part of every layer            layers.py     exchanges activations with the ranks that have the other parts
pipe     a slice of these split layers    stages.py     exchanges activations with the ranks of the other slices
data     gradients are averaged over the ranks with the same parts of the same layers     replica.py
zero     these ranks shard the optimizer state (1), the gradients (2), the parameters (3)     sharded.py, fsdp.py
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from muster.ddp.base import broadcast
from muster.jobs.spec.modes import Parallel
from muster.jobs.train.models.made import layers_of
from muster.jobs.train.numerics import Numerics
from muster.jobs.train.parallel.cutting import cuts_of, tokens_of
from muster.jobs.train.parallel.forms import Forms
from muster.jobs.train.parallel.layers import Parts, split_layers, whole_layers
from muster.jobs.train.parallel.replica import Replica
from muster.jobs.train.parallel.stages import Stages
from muster.jobs.train.parallel.state import ModelState
from muster.jobs.train.parallel.syncs import replica_of
from muster.jobs.train.profiling.clock import StepMarks
from muster.jobs.world.world import COLLECTIVE_TIMEOUT_S, World
from muster.pipe.mesh import AXES, Groups, Mesh
from muster.pipe.schedules.tables import schedule

if TYPE_CHECKING:
    from muster.jobs.spec.train import TrainSettings

TIMEOUT: Final = timedelta(seconds=COLLECTIVE_TIMEOUT_S)


@dataclass(frozen=True)
class RankModel:
    """The part of a model on one rank. Methods that return whole tensors are collectives.

    `parts` describes this rank's part of every layer, and `stages` runs its layers (None: it has all). `replica`
    averages their gradients over the ranks with the same parts.
    """

    parts: Parts
    stages: Stages | None
    replica: Replica
    data_group: dist.ProcessGroup | None  # the ranks with the same parts of the same layers
    norm_group: dist.ProcessGroup | None  # the ranks that together have the whole gradient; None if each rank has it
    world: World

    @property
    def module(self) -> nn.Module:
        """This rank's layers."""
        return self.replica.module

    @property
    def whole(self) -> Forms:
        """The names, dtypes and shapes of the whole model."""
        return self.parts.whole

    def is_counted(self, name: str) -> bool:
        """Return True if no earlier stage and no earlier tensor rank has the same parameter."""
        return (self.stages is None or name not in self.stages.pipeline.tied) and self.parts.answers(name)

    def counted(self) -> list[Tensor] | None:
        """Return the gradients that this rank contributes to a norm over `norm_group`; None means all of them."""
        is_split = self.stages is not None or self.world.tensor > 1
        return self.replica.counted(self.is_counted) if is_split else None

    def state(self, optimizer: torch.optim.Optimizer, more: Mapping[str, Tensor]) -> ModelState:
        """Return the state that this rank saves and loads. `more` has additional tensors, equal on every rank."""
        return ModelState(self.replica, optimizer, self.parts, self.world, more)

    def full_gradients(self) -> dict[str, Tensor]:
        """Copy the whole gradients of the last step, by parameter name: a collective."""
        own = self.replica.full_gradients()
        if self.stages is not None:
            pieces = [each for name, each in self.parts.local.pieces.items() if name in self.whole.trained]
            own = self.stages.exchange(own, pieces)
        return {name: self.parts.gather(name, each) for name, each in own.items()}

    def full_state(self) -> dict[str, Tensor]:
        """Copy the whole parameters and buffers, by name: a collective.

        If stages share a parameter, each of their ranks returns its own copy of it.
        """
        buffers = {name: buffer.detach().clone() for name, buffer in self.module.named_buffers()}
        own = {**self.replica.full_parameters(), **buffers}
        if self.stages is not None:
            local = self.parts.local
            found = self.stages.exchange(own, [*local.pieces.values(), *local.buffers])
            own = found | {local.aliases[name]: each for name, each in own.items() if name in local.aliases}
        return {name: self.parts.gather(name, each) for name, each in own.items()}

    def synchronize_buffers(self) -> None:
        """Broadcast the buffers of data rank 0, which are saved and used in evaluation: a collective."""
        if self.data_group is not None:
            broadcast(list(self.module.buffers()), self.data_group)


def groups_of(world: World, split: Parallel) -> Groups | None:
    """Create a rank's process groups: a collective of all ranks. Return None if every rank has all layers whole."""
    if world.group is None or not (split.schedule or split.tensor > 1):
        return None
    groups = Mesh(split.data, split.pipe, split.tensor).groups(world.group, TIMEOUT)
    if world.device.type == "cuda":  # NCCL cannot abort a communicator that is being created, so create all now
        for group in (groups.world, *(getattr(groups, axis) for axis in AXES)):
            dist.all_reduce(torch.zeros(1, device=world.device), group=group)
    return groups


def parallelize(
    model: nn.Module,
    split: Parallel,
    groups: Groups | None,
    settings: "TrainSettings",
    *,
    world: World,
    numerics: Numerics,
    clock: StepMarks,
    sample: Sequence[int],
) -> RankModel:
    """Split a model that all ranks have built identically, in place; return this rank's part. A collective.

    `sample` is the shape of one input.

    Raises:
        RefusedError: if the model cannot be split as the job says, or several data ranks have sync none.
        ValueError: if its layers cannot be split over this many tensor ranks.
    """
    whole = Forms(model)
    layers = layers_of(model, settings) if split.schedule else None
    if layers is not None:  # pipelines are cut by the sizes or times of whole layers
        table = schedule(split.schedule, split.pipe, split.microbatches, chunks=split.chunks)
        samples = -(-settings.batch_size // (split.data * split.microbatches))
        cuts = cuts_of(settings, layers, table.rank_of, (samples, *sample), world)
        if tokens := tokens_of(settings, split, sample[0]):
            table = schedule(split.schedule, split.pipe, split.microbatches, slices=len(tokens))

    parts = whole_layers(whole, world)
    if groups is not None and split.tensor > 1:
        parts = split_layers(model, whole, world, groups, settings, clock)

    module, stages = model, None
    if layers is not None:
        stages = Stages(layers, table, cuts, tokens, settings, numerics, world, groups, clock)
        module = stages.module

    data = replace(
        world,
        rank=world.data_rank,
        size=world.data_ranks,
        group=world.group if groups is None else groups.data,
        pipe=1,
        tensor=1,
    )
    sync = "none" if stages is not None and split.data == 1 else split.sync
    replica = replica_of(sync, module, parts.local, data, clock, settings, in_pipeline=stages is not None)

    of_one_copy = None if groups is None else groups.model
    norm_group = world.group if replica.is_sharded else of_one_copy
    return RankModel(parts, stages, replica, data.group, norm_group, world)
