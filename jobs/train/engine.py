"""One training step on one rank: forward and backward, averaging of gradients, clipping, optimizer step.

batch ─ parallel.Accumulation, or parallel.Stages ─ mean over ranks with the same layers ─ clip by the norm ─ step
        every layer is here      a slice of them                                           of the whole model
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from muster.jobs.checkpoint.pieces import Piece
from muster.jobs.tensors.parts import TensorPart
from muster.jobs.train.data.loading import ShardInput
from muster.jobs.train.graph import GraphedSteps, require_cuda
from muster.jobs.train.memory.held import Held, tensors_of
from muster.jobs.train.models.made import require_graphable
from muster.jobs.train.numerics import Numerics
from muster.jobs.train.parallel.accumulate import Accumulation
from muster.jobs.train.parallel.parallelize import RankModel, groups_of, parallelize
from muster.jobs.train.parallel.replicated import ReplicatedStep
from muster.jobs.train.profiling.clock import StepMarks
from muster.jobs.world.world import World

if TYPE_CHECKING:
    from muster.jobs.spec.train import TrainSettings


class Engine:
    """A rank's part of a model, and its optimizer; runs training steps and predictions."""

    def __init__(self, model: RankModel, numerics: Numerics, settings: "TrainSettings", clock: StepMarks) -> None:
        self.model = model
        self.replica = model.replica
        self.stages = model.stages
        self.clock = clock
        self.scaler = numerics.scaler()
        if self.stages is not None:
            # Stages that finish early continue with the next step, unless all stages exchange values in every step.
            agrees = settings.precision == "fp16" or settings.non_finite == "skip"
            self.scaler.agrees = agrees or settings.clip_norm is not None
            self.stages.attach(self.replica, self.scaler, model.whole.aliases)
        self.clip_norm = settings.clip_norm
        self.same_norm = settings.same_norm
        runs = ReplicatedStep if settings.sync == "data_parallel" else Accumulation
        self.runs = self.stages or runs(self.replica, numerics, self.scaler, settings)
        self.optimizer: torch.optim.Optimizer = self.replica.build_optimizer(numerics, settings)
        self.state = model.state(self.optimizer, self.scaler.state())
        # A pipeline records graphs of its actions, not of whole steps.
        self.graphed = None
        if settings.cuda_graph and self.stages is None:
            self.graphed = GraphedSteps(clock, model.world.device)

    @property
    def not_timed(self) -> str:
        """The reason why timelines lack collectives of this rank's steps; empty if none are missing."""
        if self.graphed is not None:
            return "no part of a step that is replayed from a CUDA graph can be timed"
        return (
            "the exchanges within split layers are not timed" if self.model.world.tensor > 1 else self.replica.not_timed
        )

    @property
    def module(self) -> nn.Module:
        """This rank's layers."""
        return self.model.module

    def train_step(self, step: int, shards: Sequence[ShardInput]) -> list[Tensor]:
        """Train on this rank's part of a global batch.

        Returns a float64 scalar for each of this rank's virtual ranks: the sum of the losses of its samples.
        """
        if self.graphed is None:
            return self._step(step, shards)
        return self.graphed.run(self._step, step, shards)

    def _step(self, step: int, shards: Sequence[ShardInput]) -> list[Tensor]:
        self.optimizer.zero_grad(set_to_none=True)
        losses = self.runs.run(step, shards)
        self._advance()
        self.clock.lap("optimizer")
        return losses

    def _advance(self) -> None:
        """Clip by the norm of the whole model's gradients, each counted once, and step the optimizer."""
        self.scaler.step(
            self.optimizer,
            self.replica.gradients(),
            self.clip_norm,
            self.model.norm_group,
            exact=self.same_norm,
            counted=self.model.counted(),
        )

    def figures(self) -> dict[str, Tensor]:
        """Return additional metrics columns for the last step, as scalars that may still be on the device."""
        return self.scaler.row() | self.replica.figures()

    def predict(self, inputs: Tensor) -> Tensor:
        """Run the model in evaluation mode.

        All ranks must call this equally often, because a forward may be a collective.
        """
        self.module.eval()
        with torch.no_grad():
            outputs = self.runs.predict(inputs)
        self.module.train()
        return outputs

    def held_state(self) -> list[TensorPart]:
        """List the parts that this rank saves. Together, the ranks save each part once."""
        return self.state.parts()

    def wanted_state(self, stored: Mapping[str, Piece]) -> list[TensorPart]:
        """List the parts to fill from a checkpoint's tensors. Must be called before the first step."""
        assert self.graphed is None or not self.graphed.recorded, "a recorded step would continue with the old state"
        return self.state.wanted(stored)

    def held_tensors(self) -> Held:
        """List the tensors of this rank by kind: parameters, gradients, optimizer, buffers."""
        return tensors_of(self.module, self.optimizer, self.replica.wrapper)

    def rehearse(self, shards: Sequence[ShardInput]) -> None:
        """Run one backward before a checkpoint is loaded, if the first backward determines the order of later sums."""
        self.runs.rehearse(shards)
        self.optimizer.zero_grad(set_to_none=True)


def build_engine(
    settings: "TrainSettings",
    model: nn.Module,
    world: World,
    clock: StepMarks,
    numerics: Numerics,
    sample: Sequence[int] = (),
) -> Engine:
    """Split a model by the job's mode and build its optimizer: a collective.

    `numerics.place` must have placed the model. `sample` is the shape of one input, used to cut a pipeline.
    """
    if settings.cuda_graph:
        require_cuda(world.device)
        if settings.model.make is not None:
            require_graphable(model, settings)
    split = settings.split(world.size)
    groups = groups_of(world, split)
    rank_model = parallelize(model, split, groups, settings, world=world, numerics=numerics, clock=clock, sample=sample)
    return Engine(rank_model, numerics, settings, clock)
