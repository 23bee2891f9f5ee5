"""The engine of pipelines: every rank has a slice of the layers, and all ranks of a pipeline read the same batch.

    batch ─ micro-batches ─ forwards and backwards in the schedule's order ─ shared weights ─ clip ─ optimizer
                            `pipe.Pipeline`                                  added up        norm of all stages

Gradients are those of one process that takes the same micro-batches one after another (`reference.py`). Batch norm
computes with each micro-batch's own statistics, and records those of all of them, in order. Dropout is keyed by layer
(`layer_seeds.py`).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from muster.ddp.norms import clip_by, plain_norm, reproducible_norm
from muster.jobs.checkpoint.pieces import Piece
from muster.jobs.spec.train import TrainSettings
from muster.jobs.tensors.parts import Part
from muster.jobs.train.loading import ShardInput
from muster.jobs.train.memory.held import Held, tensors_of
from muster.jobs.train.models.stack import Stack, mean_loss
from muster.jobs.train.models.tensor_plan import loss_of
from muster.jobs.train.numerics import Numerics
from muster.jobs.train.profiling.clock import Clock, Phase
from muster.jobs.train.rng.layer_seeds import layer_seed
from muster.jobs.train.stage_replicas import replica_of
from muster.jobs.train.stages import Places, cuts_of, in_autocast
from muster.jobs.train.state import MODEL
from muster.jobs.train.tensor_parts import groups_of, split_parts
from muster.jobs.world.world import World
from muster.pipe import Pipeline
from muster.pipe.schedules.actions import Action
from muster.pipe.schedules.programs import Step
from muster.pipe.schedules.tables import schedule
from muster.pipe.tensor.vocabulary import VocabularyLinear


class PipelineEngine:
    """One rank's slice of a model, and what it does in a step."""

    def __init__(self, model: Stack, world: World, clock: Clock, settings: TrainSettings, numerics: Numerics) -> None:
        split = settings.split(world.size)
        assert split.schedule
        self.world = world
        self.clock = clock
        self.scaler = numerics.scaler()
        self.clip_norm = settings.clip_norm
        # Stages that are done early go on to the next step, unless they exchange something anyway, or must agree.
        self.scaler.agrees = (
            settings.clip_norm is not None or settings.precision == "fp16" or settings.non_finite == "skip"
        )
        self.same_norm = settings.same_norm
        groups = groups_of(world)
        self.group = None if groups is None else groups.pipe
        table = schedule(split.schedule, split.pipe, split.microbatches, chunks=split.chunks)
        samples = -(-settings.batch_size // (split.data * split.microbatches))
        cuts = cuts_of(settings, model, table.rank_of, samples, world)
        self.places = Places(model, cuts, table.rank_of, world)
        self.parts = split_parts(model, world, groups, settings)
        self.forms = self.parts.whole
        self.loss_of = loss_of(model[-1]) if isinstance(model[-1], VocabularyLinear) else mean_loss
        in_autocast(model, numerics)
        self.seed = settings.seed
        self.at = (0, world.data_rank)  # step, virtual rank
        self.of_all: float | None = None  # samples of all pipelines, where they have different numbers
        self.pipeline = Pipeline(
            model,
            table,
            loss=self._loss,
            cuts=cuts,
            process_group=self.group,
            layerwise=settings.layerwise,
            recompute=settings.activation_checkpointing,
            exact=settings.exact,
            cuda_graphs=settings.cuda_graph,
        )
        if settings.model.dropout > 0.0:
            self.pipeline.hooks.seeds = self._seed_of
        self.module: nn.Module = self.pipeline.module
        self.replica = replica_of(self.pipeline, self.parts, groups, world, settings, split)
        self.optimizer = self.replica.build_optimizer(numerics, settings)
        self.held = self.replica.held(self.optimizer, self.scaler.state())

    # A step ---------------------------------------------------------------------------------------------------------

    def train_step(self, step: int, shards: Sequence[ShardInput]) -> list[Tensor]:
        """Run the batch through the pipeline, clip, step."""
        (shard,) = shards
        (batch,) = shard.micro_batches
        self.optimizer.zero_grad(set_to_none=True)
        scale = self.scaler.scaled(torch.ones((), dtype=torch.float64, device=self.world.device))
        self.at, self.of_all = (step, shard.virtual_rank), None
        if batch.weight != 1.0:
            self.of_all = round(batch.samples * self.world.data_ranks / batch.weight) if batch.samples else math.inf
        with self.replica.running():
            self.pipeline.step(batch.inputs, batch.targets)
            if self.world.device.type == "cpu":  # elsewhere the host's times are not those of the device
                self.clock.laps_at((phase_of(span.step), span.end_s) for span in self.pipeline.spans)
            self.clock.lap("communication" if self.world.device.type == "cpu" else "backward")
        self.clock.lap("communication")
        self._advance()
        self.clock.lap("optimizer")
        assert self.pipeline.loss_sum is not None
        return [self.pipeline.loss_sum / scale if batch.samples else torch.zeros_like(scale)]

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        loss = self.scaler.scaled(self.loss_of(logits, targets))
        if self.of_all is None:
            return loss
        weighed: Tensor = _Weighed.apply(loss, len(targets) * self.world.data_ranks / self.of_all)  # type: ignore[no-untyped-call]
        return weighed

    def _seed_of(self, microbatch: int, layer: int) -> int:
        return layer_seed(self.seed, *self.at, microbatch, layer)

    def _advance(self) -> None:
        """Clip by the norm over all stages, in which a weight that two of them share counts once, and step."""
        every, group = self.replica.gradients(), self.replica.norm_group
        self.scaler.unscale(every, group if self.scaler.agrees else None)
        if self.clip_norm is not None:
            norm_of = reproducible_norm if self.same_norm else plain_norm
            clip_by(every, norm_of(self.replica.counted(), group, reduce=group is not None), self.clip_norm)
        self.scaler.advance(self.optimizer)

    def figures(self) -> dict[str, Tensor]:
        """Return what scaled the losses, if anything did."""
        return self.scaler.row()

    def predict(self, inputs: Tensor) -> Tensor:
        """Run the model in evaluation mode, without gradients; every rank of the pipeline has what comes out."""
        self.replica.whole()
        self.module.eval()
        with torch.no_grad():
            outputs = self.pipeline.evaluate(inputs)
        self.module.train()
        return outputs

    # What it is made of ---------------------------------------------------------------------------------------------

    def full_gradients(self) -> dict[str, Tensor]:
        """Send the gradients of the last step to all ranks."""
        own = self.replica.full_gradients()
        return {
            name: self.parts.gather(name, self.places.broadcast(name, own, piece, self.group))
            for name, piece in self.parts.local.pieces.items()
            if name in self.forms.trained
        }

    def full_state(self) -> dict[str, Tensor]:
        """Send parameters and buffers to all ranks; of a shared parameter every rank that has one returns its own."""
        self.replica.whole()
        own = dict((*self.module.named_parameters(), *self.module.named_buffers()))
        pieces = [*self.parts.local.pieces.values(), *self.parts.local.buffers]
        names = [piece.name.removeprefix(MODEL) for piece in pieces]
        found = {
            name: self.places.broadcast(name, own, piece, self.group) for name, piece in zip(names, pieces, strict=True)
        }
        copies = {self.forms.aliases[name]: each for name, each in own.items() if name in self.forms.aliases}
        found |= {name: each.detach().clone() for name, each in copies.items()}
        return {name: self.parts.gather(name, each) for name, each in found.items()}

    def synchronize_buffers(self) -> None:
        """Deal out the buffers of the first pipeline: one rank of it has each."""
        self.replica.synchronize_buffers()

    def held_state(self) -> list[Part]:
        """List this rank's layers."""
        return self.held.parts()

    def wanted_state(self, stored: Mapping[str, Piece]) -> list[Part]:
        """List what of a checkpoint they are filled with."""
        return self.held.wanted(stored)

    def held_tensors(self) -> Held:
        """List what the slice and the optimizer hold."""
        return tensors_of(self.module, self.optimizer, getattr(self.replica, "wrapper", None))

    def refresh(self) -> None:
        """Make use of what was read."""
        self.replica.refresh()

    def rehearse(self, shards: Sequence[ShardInput]) -> None:
        """Do nothing: a first step teaches nothing."""


def phase_of(step: Step) -> Phase:
    """Return which part of a rank's time a step of a schedule is counted in."""
    if not isinstance(step, Action):
        return "communication"
    return "forward" if step.kind == "F" else "backward"


class _Weighed(torch.autograd.Function):
    """A loss as it is, whose gradient is what its samples count among those of all pipelines, and not in their own."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, weight: float) -> Tensor:
        ctx.weight = weight
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None]:
        return torch.full_like(gradients[0], ctx.weight), None
