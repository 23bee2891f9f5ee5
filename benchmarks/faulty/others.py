"""Optimizers, sharded modules and pipelines with one fault each, for `benchmarks/with_faults.py`."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from muster.jobs.examples.own.my_fsdp import MyFSDP
from muster.jobs.examples.own.my_optimizer import ShardedOptimizer
from muster.jobs.examples.own.my_pipeline import MyPipeline


class KeepsAllState(ShardedOptimizer):
    """Steps every parameter on every rank."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        Optimizer.add_param_group(self, param_group)
        if self.inner is None:
            self.inner = self.optimizer_cls([self.param_groups[-1]], **self.options)
        else:
            self.inner.add_param_group(self.param_groups[-1])


class NoBroadcastAfterStep(ShardedOptimizer):
    """Steps its own parameters, and does not send them."""

    def step(self, closure: Any = None) -> Any:
        return self.inner.step() if self.inner is not None else None


class ForgetsGroups(ShardedOptimizer):
    """Does not step a group that is added later."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if hasattr(self, "started"):
            Optimizer.add_param_group(self, param_group)
        else:
            super().add_param_group(param_group)

    def step(self, closure: Any = None) -> Any:
        self.started = True
        return super().step(closure)


class KeepsSettings(ShardedOptimizer):
    """Steps with the settings that the groups had when they were added."""

    def step(self, closure: Any = None) -> Any:
        self.settings.clear()
        return super().step(closure)


class KeepsParameters(MyFSDP):
    """Keeps the whole parameters on every rank."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        for unit in self.units:
            unit.free = lambda *_: None  # type: ignore[method-assign]
            unit.gather()


class SumOfShards(MyFSDP):
    """Adds gradients, and does not divide."""

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        for unit in self.units:
            if unit.shard.grad is not None:
                unit.shard.grad *= torch.distributed.get_world_size()
        return super().parameters(recurse)


class RunsEverything(MyPipeline):
    """Runs all layers on every rank."""

    def __init__(self, layers: nn.Sequential, microbatches: int) -> None:
        super().__init__(layers, microbatches)
        self.stage = layers

    def train_step(self, inputs: Tensor, targets: Tensor, loss: Callable[[Tensor, Tensor], Tensor]) -> float | None:
        total = 0.0
        for part in zip(inputs.chunk(self.microbatches), targets.chunk(self.microbatches), strict=True):
            value = loss(self.stage(part[0]), part[1]) / self.microbatches
            value.backward()
            total += float(value.detach())
        return total


class SumOfMicroBatches(MyPipeline):
    """Adds the losses of micro-batches, and does not divide."""

    def forward(self, inputs: Tensor, targets: Tensor, loss: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
        return super().forward(inputs, targets, lambda *pair: loss(*pair) * self.microbatches)


class OneAtATime(MyPipeline):
    """Begins a micro-batch when the one before it is done on all ranks."""

    def train_step(self, inputs: Tensor, targets: Tensor, loss: Callable[[Tensor, Tensor], Tensor]) -> float | None:
        total = 0.0
        for part in zip(inputs.chunk(self.microbatches), targets.chunk(self.microbatches), strict=True):
            x, y = self.forward(*part, loss)
            self.backward(x, y)
            total += float(y.detach()) if self.rank == self.last else 0.0
        return total if self.rank == self.last else None
