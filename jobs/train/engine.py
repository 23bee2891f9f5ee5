"""Engines: one training step on one rank. The loop knows only the `Engine` protocol.

`DataParallelEngine` forwards and backwards each of its virtual ranks in turn, lets the replica make the mean, clips
and steps. Batch norm computes with each shard's own statistics; the running statistics, which are saved and used by
evaluation, are those of virtual rank 0 alone (what PyTorch's DDP saves), and `synchronize_buffers` deals them out.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from muster.jobs.checkpoint.pieces import Piece
from muster.jobs.spec.train import TrainSettings
from muster.jobs.tensors.parts import Part
from muster.jobs.train.graph import GraphedEngine, require_cuda
from muster.jobs.train.loading import MicroInput, ShardInput
from muster.jobs.train.memory.held import Held, tensors_of
from muster.jobs.train.models.stack import Stack
from muster.jobs.train.modes import WRAP, broadcast_buffers
from muster.jobs.train.numerics import Numerics
from muster.jobs.train.numerics.scaling import Scaler
from muster.jobs.train.pipeline import PipelineEngine
from muster.jobs.train.profiling.clock import Clock
from muster.jobs.train.replica import Replica
from muster.jobs.train.rng.layer_seeds import forward_seed
from muster.jobs.train.shards import Forms
from muster.jobs.train.tensor_replica import split_layers
from muster.jobs.world.world import World


class Engine(Protocol):
    """What the loop needs of a way to train."""

    module: nn.Module  # what this rank has of it
    optimizer: torch.optim.Optimizer
    forms: Forms  # of all of it
    scaler: Scaler

    def train_step(self, step: int, shards: Sequence[ShardInput]) -> list[Tensor]:
        """Train on this rank's part of a global batch.

        Returns one float64 scalar per virtual rank of this rank: the sum over its samples of their loss.
        """
        ...

    def figures(self) -> dict[str, Tensor]:
        """Return what else the row of the step just done shows: scalars that may still be on the device."""
        ...

    def predict(self, inputs: Tensor) -> Tensor:
        """Run the model as evaluation does: every rank as often, for ranks may share parameters out."""
        ...

    def full_gradients(self) -> dict[str, Tensor]:
        """Copy the gradients that the last step was made with, whole, by name of parameter: a collective."""
        ...

    def full_state(self) -> dict[str, Tensor]:
        """Copy parameters and buffers, whole, by name, a shared one once: a collective."""
        ...

    def synchronize_buffers(self) -> None:
        """Make every rank's buffers those that are saved and evaluated."""
        ...

    def held_state(self) -> list[Part]:
        """List the parts of the state that this rank saves: all ranks together every part once."""
        ...

    def wanted_state(self, stored: Mapping[str, Piece]) -> list[Part]:
        """List the parts that this rank reads of a checkpoint's tensors, to be filled in place."""
        ...

    def held_tensors(self) -> Held:
        """List what this rank holds now, by kind: parameters, gradients, optimizer, buffers."""
        ...

    def refresh(self) -> None:
        """Make use of state that was read into the parts of `wanted_state`: a collective."""
        ...

    def rehearse(self, shards: Sequence[ShardInput]) -> None:
        """Let the first backward's lesson be learned before a checkpoint is read: all that it changes is read then."""
        ...


class DataParallelEngine:
    """A replica on every rank, which is whole, or which the ranks share out."""

    def __init__(
        self,
        replica: Replica,
        optimizer: torch.optim.Optimizer,
        world: World,
        settings: TrainSettings,
        numerics: Numerics,
        forms: Forms,
    ) -> None:
        self.module = replica.module
        self.forms = forms
        self.optimizer = optimizer
        self.replica = replica
        self.world = world
        self.numerics = numerics
        self.scaler = numerics.scaler()
        self.clip_norm = settings.clip_norm
        self.dropout_seed = settings.seed if settings.model.dropout > 0.0 else None
        self.norms = [module for module in self.module.modules() if isinstance(module, _NormBase)]
        self.same_norm = settings.same_norm
        self.held = replica.held(optimizer, self.scaler.state())
        self.tracking = True

    def train_step(self, step: int, shards: Sequence[ShardInput]) -> list[Tensor]:
        """Forward and backward every shard, average the gradients, clip, step."""
        self.optimizer.zero_grad(set_to_none=True)
        losses = [self._shard(step, shards[0], last=len(shards) == 1)]
        for shard in shards[1:]:
            self.replica.next_shard()
            losses.append(self._shard(step, shard, last=shard is shards[-1]))
        self.replica.finish()
        replica = self.replica
        self.scaler.step(
            self.optimizer,
            replica.gradients(),
            self.clip_norm,
            replica.shard_group,
            exact=self.same_norm,
            counted=replica.counted(),
        )
        self.replica.clock.lap("optimizer")
        return losses

    def figures(self) -> dict[str, Tensor]:
        """Return what scaled the losses, if anything did."""
        return self.scaler.row()

    def predict(self, inputs: Tensor) -> Tensor:
        """Run the model in evaluation mode, without gradients."""
        self.module.eval()
        with torch.no_grad():
            outputs = self.numerics.logits(self.replica.predict, inputs)
        self.module.train()
        return outputs

    def full_gradients(self) -> dict[str, Tensor]:
        """Copy the gradients of the last step."""
        return self.replica.full_gradients()

    def full_state(self) -> dict[str, Tensor]:
        """Copy parameters and buffers."""
        buffers = {name: buffer.detach().clone() for name, buffer in self.module.named_buffers()}
        return {**self.replica.full_parameters(), **buffers}

    def synchronize_buffers(self) -> None:
        """Deal out rank 0's buffers."""
        broadcast_buffers(self.module, self.world.group)

    def held_state(self) -> list[Part]:
        """List this rank's share of the replica."""
        return self.held.parts()

    def wanted_state(self, stored: Mapping[str, Piece]) -> list[Part]:
        """List what this rank must have of it."""
        return self.held.wanted(stored)

    def refresh(self) -> None:
        """Make use of what was read."""
        self.replica.refresh()

    def held_tensors(self) -> Held:
        """List what the module and the optimizer hold."""
        return tensors_of(self.module, self.optimizer, getattr(self.replica, "wrapper", None))

    def rehearse(self, shards: Sequence[ShardInput]) -> None:
        """Forward and backward once, where the first time changes in which order later ones sum."""
        if self.replica.learns_from_first:
            self._micro_batch(shards[0].micro_batches[0], last=True)
            self.optimizer.zero_grad(set_to_none=True)

    def _shard(self, step: int, shard: ShardInput, *, last: bool) -> Tensor:
        self._track(shard.virtual_rank == 0)
        total: Tensor | None = None
        for index, micro in enumerate(shard.micro_batches):
            if self.dropout_seed is not None:
                torch.manual_seed(forward_seed(self.dropout_seed, step, shard.virtual_rank, index))
            if last and index == len(shard.micro_batches) - 1:
                loss = self._micro_batch(micro, last=True)
            else:
                with self.replica.accumulating():
                    loss = self._micro_batch(micro, last=False)
            summed = loss.detach().double() * micro.samples
            total = summed if total is None else total + summed
        assert total is not None
        return total

    def _micro_batch(self, micro: MicroInput, *, last: bool) -> Tensor:
        """Add one micro-batch's gradients; return its mean loss."""
        loss = self.numerics.loss(self.replica.forward, micro.inputs, micro.targets)
        self.replica.clock.lap("forward")
        counted = loss if micro.weight == 1.0 else loss * micro.weight
        self.replica.backward(self.scaler.scaled(counted), last=last)
        return loss

    def _track(self, tracking: bool) -> None:
        """Let batch norms update their running statistics, or only compute with the shard's own."""
        if tracking != self.tracking:
            self.tracking = tracking
            for norm in self.norms:
                norm.track_running_stats = tracking


def build_engine(settings: TrainSettings, model: nn.Module, world: World, clock: Clock, numerics: Numerics) -> Engine:
    """Wrap a model that `numerics` has placed as the job's mode says, with its optimizer."""
    parallel = settings.split(world.size)
    if parallel.schedule:
        assert isinstance(model, Stack)
        if settings.cuda_graph:
            require_cuda(world.device)
        return PipelineEngine(model, world, clock, settings, numerics)
    forms = Forms(model)
    wrap = split_layers if parallel.tensor > 1 else WRAP[parallel.sync]
    replica = wrap(model, world, clock, settings)
    optimizer = replica.build_optimizer(numerics, settings)
    engine = DataParallelEngine(replica, optimizer, world, settings, numerics, forms)
    return GraphedEngine(engine, clock, world.device) if settings.cuda_graph else engine
