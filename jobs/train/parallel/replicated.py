"""Run a step in mode data_parallel: each virtual rank is a replica on its own device, and a thread of this process.

    replicate ─ threads: forward and backward of every shard ─ reduce          clip and step on the first device

On CPUs all replicas are on the same device and divide the rank's threads.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from muster.ddp.replicas import Replicas
from muster.jobs.basics.errors import RefusedError
from muster.jobs.train.data.loading import ShardInput
from muster.jobs.train.numerics import Numerics
from muster.jobs.train.numerics.scaling import Scaler
from muster.jobs.train.numerics.weighing import Weights
from muster.jobs.train.parallel.replica import Replica

if TYPE_CHECKING:
    from muster.jobs.spec.train import TrainSettings


class ReplicatedStep:
    """The forward and backward passes of all replicas. Their gradients are averaged on the first device."""

    def __init__(self, replica: Replica, numerics: Numerics, scaler: Scaler, settings: "TrainSettings") -> None:
        self.replica = replica
        self.numerics = numerics
        self.scaler = scaler
        self.weights: Weights | None = None  # None: all targets count
        self.replicas = Replicas(replica.module, devices_of(replica.world.device, settings.replicas))

    def run(self, step: int, shards: Sequence[ShardInput]) -> list[Tensor]:
        """Run forward and backward on every shard and average the gradients; return the summed losses of each shard."""
        self.replicas.replicate()
        self.replica.clock.lap("communication")
        losses = self.replicas.run(lambda index, module: self._shard(module, shards[index], index))
        self.replica.clock.lap("backward")
        self.replicas.reduce()
        self.replica.clock.lap("communication")
        return losses

    def predict(self, inputs: Tensor) -> Tensor:
        """Run the first replica without gradients."""
        return self.numerics.logits(self.replica.predict, inputs)

    def rehearse(self, shards: Sequence[ShardInput]) -> None:
        """Do nothing: the order of sums is fixed."""

    def _shard(self, module: nn.Module, shard: ShardInput, index: int) -> Tensor:
        first, device = self.replicas.devices[0], self.replicas.devices[index]
        total = torch.zeros((), dtype=torch.float64, device=first)
        for micro in shard.micro_batches:
            inputs, targets = (each.to(device, non_blocking=True) for each in (micro.inputs, micro.targets))
            loss = self.numerics.result(module, inputs, targets)
            loss = (loss if self.weights is None else self.weights.weighed(loss, micro)).to(first)
            torch.autograd.backward(self.scaler.scaled(loss if micro.weight == 1.0 else loss * micro.weight))
            total += loss.detach().double() * micro.samples
        return total


def devices_of(first: torch.device, replicas: int) -> list[torch.device]:
    """Return the devices of the replicas: consecutive GPUs, or the CPU for all, whose threads they divide.

    Raises:
        RefusedError: if this rank can use fewer GPUs.
    """
    if first.type == "cpu":
        torch.set_num_threads(max(1, torch.get_num_threads() // replicas))
        return [first] * replicas
    usable = torch.cuda.device_count()
    if usable < replicas:
        raise RefusedError(
            f"train.replicas: {replicas} replicas need {replicas} GPUs, but this rank can use {usable}; set replicas "
            f"to at most {usable}, or device: cpu"
        )
    assert first.index is not None
    return [torch.device("cuda", (first.index + number) % usable) for number in range(replicas)]
