"""Run a step's micro-batches, one virtual rank after the other, on a rank that has every layer.

Batch norm uses each virtual rank's own statistics. The running statistics, used by evaluation and saved, are those of
virtual rank 0 only (as in PyTorch's DDP).
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase

from muster.jobs.train.data.loading import MicroInput, ShardInput
from muster.jobs.train.numerics import Numerics
from muster.jobs.train.numerics.scaling import Scaler
from muster.jobs.train.numerics.weighing import Weights
from muster.jobs.train.parallel.replica import Replica
from muster.jobs.train.rng.layer_seeds import forward_seed
from muster.pipe.rng_streams import seed_generators

if TYPE_CHECKING:
    from muster.jobs.spec.train import TrainSettings


class Accumulation:
    """The loop over all micro-batches of a rank's step, whose gradients the replica averages."""

    def __init__(self, replica: Replica, numerics: Numerics, scaler: Scaler, settings: "TrainSettings") -> None:
        self.replica = replica
        self.numerics = numerics
        self.scaler = scaler
        self.weights: Weights | None = None  # None: all targets count
        self.dropout_seed = settings.seed if settings.model.draws else None
        self.seed: Callable[[int], None] = seed_generators  # replaced while a graph is recorded
        self.norms = [module for module in replica.module.modules() if isinstance(module, _NormBase)]
        self.tracking = True

    def run(self, step: int, shards: Sequence[ShardInput]) -> list[Tensor]:
        """Run forward and backward on every shard and average the gradients; return the summed losses of each shard."""
        losses = [self._shard(step, shards[0], last=len(shards) == 1)]
        for shard in shards[1:]:
            self.replica.next_shard()
            losses.append(self._shard(step, shard, last=shard is shards[-1]))
        self.replica.finish()
        return losses

    def seeds(self, step: int, shards: Sequence[ShardInput]) -> list[int]:
        """List the seeds of a step's forwards, in order; empty if no forward draws random numbers."""
        seed = self.dropout_seed
        return [
            forward_seed(seed, step, shard.virtual_rank, index)
            for shard in shards
            for index in range(len(shard.micro_batches))
            if seed is not None
        ]

    def predict(self, inputs: Tensor) -> Tensor:
        """Run the model without gradients."""
        return self.numerics.logits(self.replica.predict, inputs)

    def rehearse(self, shards: Sequence[ShardInput]) -> None:
        """Run forward and backward once, if the first backward determines the order of later sums."""
        if self.replica.learns_from_first:
            self._micro_batch(shards[0].micro_batches[0], last=True)

    def _shard(self, step: int, shard: ShardInput, *, last: bool) -> Tensor:
        self._track(shard.virtual_rank == 0)
        total: Tensor | None = None
        for index, micro in enumerate(shard.micro_batches):
            if self.dropout_seed is not None:
                self.seed(forward_seed(self.dropout_seed, step, shard.virtual_rank, index))
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
        """Add one micro-batch's gradients; return its mean loss, undivided if targets are weighed."""
        clock = self.replica.clock
        clock.phase = "forward"
        loss = self.numerics.result(self.replica.forward, micro.inputs, micro.targets)
        if self.weights is not None:
            loss = self.weights.weighed(loss, micro)
        clock.lap("forward")
        clock.phase = "backward"
        counted = loss if micro.weight == 1.0 else loss * micro.weight
        self.replica.backward(self.scaler.scaled(counted), last=last)
        return loss

    def _track(self, tracking: bool) -> None:
        """Set whether batch norms update their running statistics."""
        if tracking != self.tracking:
            self.tracking = tracking
            for norm in self.norms:
                norm.track_running_stats = tracking
