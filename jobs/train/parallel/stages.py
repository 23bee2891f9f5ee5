"""One rank's slice of a model's layers: run a batch through it, and locate the rest of the model.

    batch ─ micro-batches ─ forwards and backwards in the schedule's order ─ shared weights ─ mean over pipelines
                            `pipe.Pipeline`                                  summed

The gradients are those of one process that runs the same micro-batches one after another (`reference.py`). Batch norm
uses each micro-batch's own statistics, and records those of all of them, in order. Dropout is keyed by layer
(`layer_seeds.py`).

    data rank 0   F B F B F B F B │     │          every data rank's pipeline has its own part of the batch;
    data rank 1   F B F B F B F B │     │ step     gradients are averaged slice by slice: by sync bucketed and by ZeRO
                              average              from the last micro-batch's backward on, by flat after it
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from muster.ddp import FlatAllReduce
from muster.ddp.reduced import Reduced
from muster.jobs.checkpoint.pieces import Piece
from muster.jobs.tensors.parts import dtype_of
from muster.jobs.train.data.loading import ShardInput
from muster.jobs.train.models.made import loss_of
from muster.jobs.train.models.stack import Stack
from muster.jobs.train.models.tensor_plan import loss_of as split_loss_of
from muster.jobs.train.numerics import Numerics
from muster.jobs.train.numerics.scaling import Scaler
from muster.jobs.train.parallel.ready import ReadyGradients
from muster.jobs.train.parallel.replica import Replica
from muster.jobs.train.parallel.state import MODEL
from muster.jobs.train.profiling.clock import Clock, Phase
from muster.jobs.train.rng.layer_seeds import layer_seed
from muster.jobs.world.world import World
from muster.pipe import Pipeline
from muster.pipe.mesh import Groups
from muster.pipe.schedules.actions import Action, Schedule
from muster.pipe.schedules.cuts import Cuts
from muster.pipe.schedules.programs import Step
from muster.pipe.tensor.vocabulary import VocabularyLinear

if TYPE_CHECKING:
    from muster.jobs.spec.train import TrainSettings


class Stages:
    """The layers of one rank of a pipeline (`module`); a replica averages their gradients over pipelines."""

    def __init__(
        self,
        model: Stack,
        table: Schedule,
        cuts: Cuts,
        settings: "TrainSettings",
        numerics: Numerics,
        world: World,
        groups: Groups | None,
        clock: Clock,
    ) -> None:
        self.world = world
        self.clock = clock
        self.seed = settings.seed
        self.group = None if groups is None else groups.pipe
        stages = [sum(number >= cut for cut in cuts) - 1 for number in range(len(model))]
        self.rank_of: dict[str, int] = {}  # of parameters and buffers
        for (name, layer), stage in zip(model._modules.items(), stages, strict=True):
            assert layer is not None
            for own, _ in chain(layer.named_parameters(name), layer.named_buffers(name)):
                self.rank_of.setdefault(own, table.rank_of[stage])
        self.at = (0, world.data_rank)  # step, virtual rank
        self.of_all: float | None = None  # samples of all pipelines, if their counts differ
        self.loss_of = split_loss_of(model[-1]) if isinstance(model[-1], VocabularyLinear) else loss_of(settings)
        in_autocast(model, numerics)
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
        if settings.model.draws:
            self.pipeline.hooks.seeds = self._seed_of
        self.module: nn.Module = self.pipeline.module

    # A step ---------------------------------------------------------------------------------------------------------

    def attach(self, replica: Replica, scaler: Scaler, shared: Mapping[str, str]) -> None:
        """Set the replica, which averages over pipelines, and the loss scaler. Called before the first step.

        `shared` maps other names of shared parameters to the first ones.
        """
        self.replica, self.scaler = replica, scaler
        self.ready: ReadyGradients | None = None  # None: all gradients are averaged after the last backward
        if isinstance(replica.wrapper, Reduced) and not isinstance(replica.wrapper, FlatAllReduce):
            self.ready = ReadyGradients(self.pipeline, replica.wrapper, {*shared, *shared.values()})

    def run(self, step: int, shards: Sequence[ShardInput]) -> list[Tensor]:
        """Run a batch through the pipeline; return the sum of the losses of its samples, as one shard."""
        (shard,) = shards
        (batch,) = shard.micro_batches
        scale = self.scaler.scaled(torch.ones((), dtype=torch.float64, device=self.world.device))
        self.at, self.of_all = (step, shard.virtual_rank), None
        if batch.weight != 1.0:
            self.of_all = round(batch.samples * self.world.data_ranks / batch.weight) if batch.samples else math.inf
        on_cpu = self.world.device.type == "cpu"  # on a GPU, the host's times are not those of the device
        with self._averaging():
            self.pipeline.step(batch.inputs, batch.targets)
            if on_cpu:
                self.clock.laps_at((phase_of(span.step), span.end_s) for span in self.pipeline.spans)
            self.clock.lap("communication" if on_cpu else "backward")
        self.clock.lap("communication")
        assert self.pipeline.loss_sum is not None
        return [self.pipeline.loss_sum / scale if batch.samples else torch.zeros_like(scale)]

    @contextmanager
    def _averaging(self) -> Iterator[None]:
        """A context for running a batch through the pipeline; it ends by averaging gradients over pipelines."""
        wrapper = self.replica.wrapper
        if not isinstance(wrapper, Reduced):
            yield
            return
        self.replica.settle()
        with wrapper.no_sync():
            yield
            if self.ready is not None:
                self.ready.row_is_over()
        wrapper.finish_gradient_synchronization()

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        loss = self.scaler.scaled(self.loss_of(logits, targets))
        if self.of_all is None:
            return loss
        weighed: Tensor = _Weighed.apply(loss, len(targets) * self.world.data_ranks / self.of_all)  # type: ignore[no-untyped-call]
        return weighed

    def _seed_of(self, microbatch: int, layer: int) -> int:
        return layer_seed(self.seed, *self.at, microbatch, layer)

    # The model ------------------------------------------------------------------------------------------------------

    def predict(self, inputs: Tensor) -> Tensor:
        """Run the model without gradients; every rank of the pipeline gets the outputs."""
        self.replica.settle()
        return self.pipeline.evaluate(inputs)

    def rehearse(self, shards: Sequence[ShardInput]) -> None:
        """Do nothing: later steps do not depend on the first."""

    def exchange(self, own: Mapping[str, Tensor], pieces: Iterable[Piece]) -> dict[str, Tensor]:
        """Return the tensors of all ranks of the pipeline; each rank passes its own: a collective."""
        found = {}
        for piece in pieces:
            name = piece.name.removeprefix(MODEL)
            source = self.world.rank_at(self.rank_of[name])
            if self.world.rank == source:
                found[name] = own[name]
            else:
                found[name] = torch.empty(piece.shape, dtype=dtype_of(piece), device=self.world.device)
            if self.group is not None:
                dist.broadcast(found[name], source, group=self.group)
        return found


def in_autocast(model: Stack, numerics: Numerics) -> None:
    """Apply autocast to every layer separately, because a pipeline runs backwards between forwards."""
    if numerics.autocast is None:
        return
    for layer in model:
        layer.forward = partial(_cast, numerics, layer)


def _cast(numerics: Numerics, layer: nn.Module, x: Tensor) -> Tensor:
    with numerics.forward():
        # looked up on each call, because splitting a layer's backward changes its class
        y: Tensor = type(layer).forward(layer, x)
    return y


def phase_of(step: Step) -> Phase:
    """Return the phase in which the time of a schedule step is counted."""
    if not isinstance(step, Action):
        return "communication"
    return "forward" if step.kind == "F" else "backward"


class _Weighed(torch.autograd.Function):
    """The identity on a loss; its gradient is weighted by the samples of all pipelines instead of this one."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, weight: float) -> Tensor:
        ctx.weight = weight
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None]:
        return torch.full_like(gradients[0], ctx.weight), None
