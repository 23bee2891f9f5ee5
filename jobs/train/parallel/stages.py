"""One rank's slice of a model's layers: run a batch through it, and locate the rest of the model.

    batch ─ micro-batches ─ forwards and backwards in the schedule's order ─ shared weights ─ mean over pipelines
                            `pipe.Pipeline`                                  summed

The gradients are those of one process that runs the same micro-batches one after another (`reference.py`). Batch norm
uses each micro-batch's own statistics, and records those of all micro-batches in order. Dropout is keyed by layer
(`layer_seeds.py`).

    data rank 0   F B F B F B F B │     │          every data rank's pipeline has its own part of the batch;
    data rank 1   F B F B F B F B │     │ step     gradients are averaged slice by slice: with sync bucketed or ZeRO
                              average              during the last micro-batch's backward, with sync flat after it
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
from muster.jobs.spec.recorded import records
from muster.jobs.tensors.parts import dtype_of
from muster.jobs.train.data.loading import ShardInput
from muster.jobs.train.models.made import loss_of
from muster.jobs.train.models.stack import LayerStack
from muster.jobs.train.models.tensor_plan import loss_of as split_loss_of
from muster.jobs.train.numerics import Numerics
from muster.jobs.train.numerics.scaling import Scaler
from muster.jobs.train.numerics.weighing import Weights
from muster.jobs.train.parallel.forms import MODEL
from muster.jobs.train.parallel.ready import ReadyGradients
from muster.jobs.train.parallel.replica import Replica
from muster.jobs.train.profiling.clock import Phase, StepMarks
from muster.jobs.train.rng.layer_seeds import layer_seed
from muster.jobs.world.world import World
from muster.pipe import Pipeline
from muster.pipe.mesh import Groups
from muster.pipe.schedules.actions import Action, Schedule
from muster.pipe.schedules.cuts import Cuts
from muster.pipe.schedules.programs import Step
from muster.pipe.tensor.vocabulary import VocabularyLinear
from muster.pipe.weighing import CountedLoss

if TYPE_CHECKING:
    from muster.jobs.spec.train import TrainSettings


class Stages:
    """The layers of one rank of a pipeline (`module`); a replica averages their gradients over pipelines."""

    def __init__(
        self,
        model: LayerStack,
        table: Schedule,
        cuts: Cuts,
        tokens: Sequence[int],
        settings: "TrainSettings",
        numerics: Numerics,
        world: World,
        groups: Groups | None,
        clock: StepMarks,
    ) -> None:
        self.world = world
        self.clock = clock
        self.seed = settings.seed
        self.group = None if groups is None else groups.pipe
        stages = [sum(number >= cut for cut in cuts) - 1 for number in range(len(model))]
        self.rank_of: dict[str, int] = {}  # the pipe rank of each parameter and buffer
        for (name, layer), stage in zip(model._modules.items(), stages, strict=True):
            assert layer is not None
            for own, _ in chain(layer.named_parameters(name), layer.named_buffers(name)):
                self.rank_of.setdefault(own, table.rank_of[stage])
        self.at = (0, world.data_rank)  # the current step and virtual rank
        self.of_all: float | None = None  # number of samples of all pipelines; None if every pipeline has equally many
        self.loss_of = split_loss_of(model[-1]) if isinstance(model[-1], VocabularyLinear) else loss_of(settings)
        in_autocast(model, numerics)
        self.pipeline = Pipeline(
            model,
            table,
            loss=self._loss,
            cuts=cuts,
            process_group=self.group,
            recompute=settings.activation_checkpointing,
            exact=settings.exact,
            cuda_graphs=settings.cuda_graph if records(settings, world.device.type) else False,
            tokens=tokens if len(tokens) > 1 else (),
        )
        self.pipeline.divides = False  # the engine divides by the targets of all pipelines
        self.weights: Weights | None = None  # None: all targets count
        if settings.model.draws:
            self.pipeline.hooks.seeds = self._seed_of
        self.module: nn.Module = self.pipeline.module

    # A step ---------------------------------------------------------------------------------------------------------

    def attach(self, replica: Replica, scaler: Scaler, shared: Mapping[str, str]) -> None:
        """Set the replica, which averages over pipelines, and the loss scaler. Called before the first step.

        `shared` maps the other names of shared parameters to their first names.
        """
        self.replica, self.scaler = replica, scaler
        self.ready: ReadyGradients | None = None  # None: all gradients are averaged after the last backward
        if isinstance(replica.wrapper, Reduced) and not isinstance(replica.wrapper, FlatAllReduce):
            self.ready = ReadyGradients(self.pipeline, replica.wrapper, {*shared, *shared.values()})
        if self.pipeline.graphs is not None:
            self.pipeline.graphs.ignores_hooks = True

    def run(self, step: int, shards: Sequence[ShardInput]) -> list[Tensor]:
        """Run a batch through the pipeline; return the sum of the losses of its samples, as one shard."""
        (shard,) = shards
        (batch,) = shard.micro_batches
        scale = self.scaler.scaled(torch.ones((), dtype=torch.float64, device=self.world.device))
        self.at, self.of_all = (step, shard.virtual_rank), None
        if batch.weight != 1.0:
            self.of_all = round(batch.samples * self.world.data_ranks / batch.weight) if batch.samples else math.inf
        on_cpu = self.world.device.type == "cpu"  # on a GPU, the pipeline measures only times of the host
        self.clock.phase = None if on_cpu else "backward"
        with self._averaging():
            self.pipeline.step(batch.inputs, batch.targets)
            if on_cpu:
                self.clock.laps_at([(phase_of(span.step), span.end_s) for span in self.pipeline.spans])
            self.clock.lap("communication" if on_cpu else "backward")
        self.clock.lap("communication")
        assert self.pipeline.loss_sum is not None
        assert self.pipeline.counted is not None
        if self.weights is not None and batch.samples:
            self.weights.add(self.pipeline.counted)
        return [self.pipeline.loss_sum / scale if batch.samples else torch.zeros_like(scale)]

    @contextmanager
    def _averaging(self) -> Iterator[None]:
        """Run a batch through the pipeline in this context. Afterwards the gradients are averaged over pipelines."""
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

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor | CountedLoss:
        loss = self.loss_of(logits, targets)
        if self.weights is None:
            return self._share(loss, targets)
        mean, count = self.weights.of_loss(loss, targets)
        return CountedLoss(self._share(mean, targets), count)

    def _share(self, loss: Tensor, targets: Tensor) -> Tensor:
        """Scale a loss, and weigh it by the samples of all pipelines."""
        loss = self.scaler.scaled(loss)
        if self.of_all is None:
            return loss
        samples: float = len(targets)
        if self.pipeline.tokens:
            samples *= targets.shape[1] / sum(self.pipeline.tokens)  # a slice counts in proportion to its length
        weighed: Tensor = _Weighed.apply(loss, samples * self.world.data_ranks / self.of_all)  # type: ignore[no-untyped-call]
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
        """Exchange tensors between the ranks of the pipeline, and return those of all ranks: a collective."""
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


def in_autocast(model: LayerStack, numerics: Numerics) -> None:
    """Apply autocast to each forward of a layer; the pipeline's backwards in between must run without autocast."""
    if numerics.autocast is None:
        return
    for layer in model:
        layer.forward = partial(_cast, numerics, layer)


def _cast(numerics: Numerics, layer: nn.Module, x: Tensor) -> Tensor:
    with numerics.forward():
        # looked up at each call, because a split backward changes the layer's class
        y: Tensor = type(layer).forward(layer, x)
    return y


def phase_of(step: Step) -> Phase:
    """Return the phase in which the time of a schedule step is counted."""
    if not isinstance(step, Action):
        return "communication"
    return "forward" if step.kind == "F" else "backward"


class _Weighed(torch.autograd.Function):
    """A function that returns a loss unchanged. Its backward replaces the gradient of the loss by `weight`."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, weight: float) -> Tensor:
        ctx.weight = weight
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None]:
        return torch.full_like(gradients[0], ctx.weight), None
