"""How tests of stages 1 and 2 wrap a module and step it."""

from collections.abc import Callable

import torch
from torch import nn

from muster.jobs.world.world import World
from muster.zero import ShardedDataParallel
from support.data_parallel_models import ToyModel, seeded
from support.sharded import SMALL_MB


def wrap(world: World, stage: int, build: Callable = ToyModel, **settings) -> ShardedDataParallel:
    settings = {"bucket_size_mb": SMALL_MB, "exact": True, **settings}
    return ShardedDataParallel(seeded(build, 1), world.group, stage=stage, **settings)


def sgd(given, module: nn.Module) -> torch.optim.Optimizer:
    """Build the same optimizer, sharded or not."""
    settings = {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-2}
    if isinstance(given, ShardedDataParallel):
        return given.optimizer(torch.optim.SGD, **settings)
    return torch.optim.SGD(module.parameters(), **settings)
