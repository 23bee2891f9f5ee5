"""Assign samples to virtual ranks at each step. Pure, with the same result on every rank.

    epoch        all samples once, in the order of a keyed permutation
    step         the next `batch_size` samples: the global batch (the last one of an epoch may be shorter)
    shard        a slice of the global batch for one virtual rank; sizes differ by at most one, larger ones first
    micro-batch  a slice of a shard for gradient accumulation; sizes again differ by at most one

The mean loss of a micro-batch is multiplied by its weight, samples x virtual ranks / global batch. The mean of the
gradients over virtual ranks then equals the mean over the global batch. With equal shards and no accumulation the
weight is exactly 1.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from torch import Tensor

from muster.jobs.train.rng.keyed import permutation

if TYPE_CHECKING:
    from muster.jobs.spec.train import TrainSettings

DEFAULT_EPOCHS: Final = 1


@dataclass(frozen=True)
class MicroBatch:
    """Samples [start, stop) of an epoch's order. Padding has 0 `samples`; it keeps the ranks' collectives matched."""

    start: int
    stop: int
    samples: int
    weight: float


@dataclass(frozen=True)
class Shard:
    """The micro-batches of one virtual rank in one step."""

    virtual_rank: int
    micro_batches: tuple[MicroBatch, ...]

    @property
    def samples(self) -> int:
        """The number of samples, without padding."""
        return sum(micro.samples for micro in self.micro_batches)


@dataclass(frozen=True)
class GlobalBatch:
    """Samples [start, stop) of an epoch's order, for one step (both counted from 0)."""

    step: int
    epoch: int
    start: int
    stop: int

    @property
    def samples(self) -> int:
        """The size of this global batch."""
        return self.stop - self.start


@dataclass(frozen=True)
class Plan:
    """The division of an epoch of `samples` into global batches, shards and micro-batches."""

    samples: int
    batch_size: int
    virtual_ranks: int
    accumulation: int = 1
    seed: int = 0

    @property
    def steps_per_epoch(self) -> int:
        """The number of global batches in an epoch, including a short last one."""
        return -(-self.samples // self.batch_size)

    def batch(self, step: int) -> GlobalBatch:
        """Return the global batch of a step, counted from 0 over all epochs."""
        epoch, index = divmod(step, self.steps_per_epoch)
        start = index * self.batch_size
        return GlobalBatch(step, epoch, start, min(start + self.batch_size, self.samples))

    def shard(self, batch: GlobalBatch, virtual_rank: int) -> Shard:
        """Return one virtual rank's part of a global batch.

        All virtual ranks have equally many micro-batches, because ranks may communicate in each of them. If a shard has
        too few samples, its last micro-batches are empty: they repeat the batch's first sample with weight 0.
        """
        start, stop = part(batch.start, batch.stop, self.virtual_ranks, virtual_rank)
        largest = -(-batch.samples // self.virtual_ranks)
        pieces = min(self.accumulation, largest)
        bounds = [part(start, stop, pieces, piece) for piece in range(pieces)]
        return Shard(virtual_rank, tuple(self._micro_batch(batch, low, high) for low, high in bounds))

    def _micro_batch(self, batch: GlobalBatch, low: int, high: int) -> MicroBatch:
        if low == high:
            return MicroBatch(batch.start, batch.start + 1, samples=0, weight=0.0)
        return MicroBatch(low, high, samples=high - low, weight=(high - low) * self.virtual_ranks / batch.samples)

    def order(self, epoch: int) -> Tensor:
        """Return an epoch's order of samples: (samples,) int64."""
        return permutation(self.seed, epoch, self.samples)


def plan_of(settings: "TrainSettings", *, samples: int, world_size: int) -> Plan:
    """Return the batch plan of a job for a world size."""
    return Plan(
        samples=samples,
        batch_size=min(settings.batch_size, samples),
        virtual_ranks=settings.virtual_world_size(world_size),
        accumulation=settings.accumulation(world_size),
        seed=settings.seed,
    )


def total_steps(settings: "TrainSettings", plan: Plan) -> int:
    """Return the number of steps that the job asks for."""
    return settings.steps or (settings.epochs or DEFAULT_EPOCHS) * plan.steps_per_epoch


def part(start: int, stop: int, parts: int, index: int) -> tuple[int, int]:
    """Cut [start, stop) into parts whose sizes differ by at most one, larger ones first; return part `index`."""
    size, larger = divmod(stop - start, parts)
    low = start + index * size + min(index, larger)
    return low, low + size + (index < larger)
