"""Several pipelines side by side: how the gradients of one slice of a model become the mean over those that have it.

    data rank 0   F B F B F B F B │     │          every data rank's pipeline has its own part of the batch;
    data rank 1   F B F B F B F B │     │ step     gradients are averaged slice by slice: by sync bucketed and by ZeRO
                              average              from the last micro-batch's backward on, by flat after it

With ZeRO every rank steps its share of its slice, and has the optimizer's state (stage 1), and after the average the
gradients (2), for no other.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from muster.ddp import BucketedDDP, FlatAllReduce
from muster.ddp.base import broadcast
from muster.ddp.reduced import Reduced
from muster.jobs.spec.modes import Parallel
from muster.jobs.spec.train import TrainSettings
from muster.jobs.tensors.parts import HeldState
from muster.jobs.train.numerics import Numerics
from muster.jobs.train.numerics.optim import gradients_of, named_gradients
from muster.jobs.train.sharded import sharded_optimizer, shares_of
from muster.jobs.train.shards import SharedState
from muster.jobs.train.stage_ready import ReadyGradients
from muster.jobs.train.stage_state import StageState
from muster.jobs.train.tensor_parts import Parts
from muster.jobs.train.tensor_state import TensorState
from muster.jobs.world.world import World
from muster.pipe import Pipeline
from muster.pipe.mesh import Groups
from muster.zero import ShardedDataParallel, ShardedOptimizer
from muster.zero.flat import Held


class StageReplica:
    """One rank's slice of a model, whose pipeline is the only one; `parts` says which of every layer."""

    def __init__(self, pipeline: Pipeline, parts: Parts, groups: Groups | None, world: World) -> None:
        self.pipeline = pipeline
        self.module: nn.Module = pipeline.module
        self.parts = parts
        self.forms = parts.local
        self.world = world
        self.norm_group: dist.ProcessGroup | None = (
            None if groups is None else groups.model
        )  # of ranks that have one gradient together

    @contextmanager
    def running(self) -> Iterator[None]:
        """Within it a batch goes through the pipeline; after it the gradients are the mean over pipelines."""
        yield

    def gradients(self) -> list[Tensor]:
        """Return what of the mean gradients this rank steps with, to be changed in place."""
        return gradients_of(self.module.parameters())

    def counted(self) -> list[Tensor]:
        """Return those of them that a norm counts here: of a weight that two ranks have, one does."""
        return gradients_of(each for name, each in self.module.named_parameters() if self.is_counted(name))

    def is_counted(self, name: str) -> bool:
        """True where no earlier stage, and no earlier tensor rank, has the same parameter."""
        return name not in self.pipeline.tied and self.parts.answers(name)

    def build_optimizer(self, numerics: Numerics, settings: TrainSettings) -> torch.optim.Optimizer:
        """Build what steps this rank's parameters."""
        return numerics.optimizer(self.module.parameters(), settings.optimizer)

    def held(self, optimizer: torch.optim.Optimizer, more: Mapping[str, Tensor]) -> HeldState:
        """Return what of the state this rank saves and reads; `more` are further tensors, the same on every rank."""
        rank, ranks, leads = self.world.data_rank, self.world.data_ranks, self.world.pipe_rank == 0
        own = StageState(self.module, optimizer, self.forms, rank=rank, ranks=ranks, leads=leads, more=more)
        return TensorState(own, self.parts)

    def whole(self) -> None:
        """Wait until the parameters are what was stepped: a collective."""

    def refresh(self) -> None:
        """Make use of state that has been written into the tensors that `held` told: a collective."""

    def full_gradients(self) -> dict[str, Tensor]:
        """Copy the gradients of this slice, whole: a collective of those that have it."""
        return named_gradients(self.module)

    def synchronize_buffers(self) -> None:
        """Deal out the buffers of the first pipeline."""


class SharedReplica(StageReplica):
    """A slice that other pipelines have, too, in a wrapper that makes the mean."""

    wrapper: Reduced

    def __init__(self, pipeline: Pipeline, parts: Parts, groups: Groups, world: World) -> None:
        super().__init__(pipeline, parts, groups, world)
        self.data_group = groups.data
        self.ready: ReadyGradients | None = None  # None: all of it is averaged after the last backward

    def overlap(self) -> None:
        """Average what is whole while other micro-batches and stages are still at work."""
        shared = {*self.forms.aliases, *self.forms.aliases.values()}
        self.ready = ReadyGradients(self.pipeline, self.wrapper, shared)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Average beside the last backward, or after it."""
        with self.wrapper.no_sync():
            yield
            if self.ready is not None:
                self.ready.row_is_over()
        self.wrapper.finish_gradient_synchronization()

    def synchronize_buffers(self) -> None:
        """Deal out the buffers of the first pipeline."""
        broadcast(list(self.module.buffers()), self.data_group)


class AveragedReplica(SharedReplica):
    """A slice that is stepped whole on every rank that has it."""

    def __init__(self, pipeline: Pipeline, parts: Parts, groups: Groups, world: World, settings: TrainSettings) -> None:
        super().__init__(pipeline, parts, groups, world)
        if settings.split(world.size).sync == "flat":
            self.wrapper = FlatAllReduce(self.module, groups.data)
        else:
            self.wrapper = BucketedDDP(self.module, groups.data, bucket_size_mb=settings.bucket_size_mb)
            self.overlap()


class ShardedReplica(SharedReplica):
    """A slice whose optimizer state those that have it share out."""

    wrapper: ShardedDataParallel

    def __init__(self, pipeline: Pipeline, parts: Parts, groups: Groups, world: World, settings: TrainSettings) -> None:
        super().__init__(pipeline, parts, groups, world)
        stage = settings.split(world.size).zero
        assert stage in (1, 2)
        self.norm_group = groups.world
        self.wrapper = ShardedDataParallel(
            self.module, groups.data, stage=stage, bucket_size_mb=settings.bucket_size_mb
        )
        self.optimizer: ShardedOptimizer | None = None
        self.overlap()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Share the mean out beside the last backward, of parameters that are there."""
        self.wrapper.synchronize()
        with super().running():
            yield

    def gradients(self) -> list[Tensor]:
        """Return this rank's share of the mean gradients."""
        assert self.optimizer is not None
        return self.optimizer.gradients()

    def counted(self) -> list[Tensor]:
        """Return the ranges of its share that no other rank counts."""
        return shares_of(self.wrapper, self.is_counted)

    def build_optimizer(self, numerics: Numerics, settings: TrainSettings) -> torch.optim.Optimizer:
        """Build what steps this rank's share; parameters of 16 bits in float32 copies."""
        self.optimizer = sharded_optimizer(self.wrapper, numerics, settings)
        return self.optimizer

    def held(self, optimizer: torch.optim.Optimizer, more: Mapping[str, Tensor]) -> HeldState:
        """Return this rank's share of the state, by the names of the whole model."""
        assert isinstance(optimizer, ShardedOptimizer)

        def named(each: Held) -> Held:
            name = self.forms.aliases.get(each.name, each.name)
            return each if name == each.name else replace(each, name=name, answers=False)

        def held() -> Sequence[Held]:
            return [named(each) for each in (*self.wrapper.held_parameters(), *optimizer.held_state())]

        rank, leads = self.world.data_rank, self.world.pipe_rank == 0
        own = SharedState(self.module, optimizer.inner, self.forms, held, rank=rank, more=more, leads=leads)
        return TensorState(own, self.parts)

    def whole(self) -> None:
        """Wait for the parameters that are being gathered."""
        self.wrapper.synchronize()

    def refresh(self) -> None:
        """Gather the parameters whose shares have been written."""
        self.wrapper.refresh(masters=True)

    def full_gradients(self) -> dict[str, Tensor]:
        """Gather the gradients."""
        return self.wrapper.full_gradients()


def replica_of(
    pipeline: Pipeline, parts: Parts, groups: Groups | None, world: World, settings: TrainSettings, split: Parallel
) -> StageReplica:
    """Return how a slice is held: alone, or beside those of other pipelines."""
    if split.data == 1 or groups is None:
        return StageReplica(pipeline, parts, groups, world)
    if split.zero:
        return ShardedReplica(pipeline, parts, groups, world, settings)
    return AveragedReplica(pipeline, parts, groups, world, settings)
