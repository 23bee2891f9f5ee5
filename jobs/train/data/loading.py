"""Read the inputs of a rank's virtual ranks for each step of a plan, ahead of time if the job has loader workers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from muster.jobs.machine.workers import protect
from muster.jobs.train.data.sampling import GlobalBatch, Plan

if TYPE_CHECKING:
    from muster.jobs.train.data import Data


@dataclass(frozen=True)
class MicroInput:
    """Inputs and targets of a micro-batch, or padding if `samples` is 0. The loss is multiplied by `weight`."""

    inputs: Tensor
    targets: Tensor
    samples: int
    weight: float


@dataclass(frozen=True)
class ShardInput:
    """The micro-batches of one virtual rank."""

    virtual_rank: int
    micro_batches: tuple[MicroInput, ...]


@dataclass(frozen=True)
class StepInput:
    """The inputs of one rank in one step."""

    batch: GlobalBatch
    shards: tuple[ShardInput, ...]

    @property
    def samples(self) -> int:
        """The number of samples of this rank, without padding."""
        return sum(micro.samples for shard in self.shards for micro in shard.micro_batches)


class Steps(Dataset[StepInput]):
    """A data set whose item n has the inputs of some virtual ranks in step n. Steps can be read in any order."""

    def __init__(self, data: "Data", plan: Plan, virtual_ranks: Sequence[int]) -> None:
        self.data = data
        self.plan = plan
        self.virtual_ranks = virtual_ranks
        self._order: tuple[int, Tensor] | None = None

    def __getitem__(self, step: int) -> StepInput:
        """Read the samples of one step, counted from 0."""
        batch = self.plan.batch(step)
        order = self._order_of(batch.epoch)
        shards = []
        for virtual_rank in self.virtual_ranks:
            micro_inputs = []
            for micro in self.plan.shard(batch, virtual_rank).micro_batches:
                inputs, targets = self.data.train_batch(order[micro.start : micro.stop], batch.epoch)
                micro_inputs.append(MicroInput(inputs, targets, micro.samples, micro.weight))
            shards.append(ShardInput(virtual_rank, tuple(micro_inputs)))
        return StepInput(batch, tuple(shards))

    def _order_of(self, epoch: int) -> Tensor:
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, self.plan.order(epoch)
        return self._order[1]


def read_steps(steps: Steps, first: int, stop: int, *, workers: int) -> Iterator[StepInput]:
    """Yield the inputs of steps [first, stop), read ahead by `workers` processes (0: by this process)."""
    if workers == 0:
        yield from map(steps.__getitem__, range(first, stop))
        return
    protect()
    yield from DataLoader(
        steps,
        batch_size=None,
        sampler=range(first, stop),
        num_workers=workers,
        collate_fn=_as_it_is,
        multiprocessing_context="fork",  # only forked processes inherit the files that data sets have mapped
    )


def move(step: StepInput, device: torch.device, dtype: torch.dtype) -> StepInput:
    """Move a step's tensors to the device, and convert floating-point inputs to the dtype."""
    if device.type == "cpu" and dtype == torch.float32:
        return step
    shards = (
        replace(shard, micro_batches=tuple(_move(micro, device, dtype) for micro in shard.micro_batches))
        for shard in step.shards
    )
    return replace(step, shards=tuple(shards))


def move_inputs(inputs: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Move inputs to the device, and convert them to the dtype if they are floating-point."""
    return inputs.to(device, dtype if inputs.is_floating_point() else None, non_blocking=True)


def _move(micro: MicroInput, device: torch.device, dtype: torch.dtype) -> MicroInput:
    return replace(
        micro,
        inputs=move_inputs(micro.inputs, device, dtype),
        targets=micro.targets.to(device, non_blocking=True),
    )


def _as_it_is(step: Any) -> Any:
    return step
