"""Steps of a module in units, what one process makes of them, and how many units are whole at a time."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from muster.jobs.world.world import World
from muster.zero import ShardedDataParallel
from muster.zero.unit_states import UnitStates
from support.zero_models import row_major, seeded
from support.zero_units import WIDTH, Case


def inputs_of(step: int, shard: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + shard)
    return torch.randn(2, 18, WIDTH, generator=generator).to(dtype)


def loss_of(module: nn.Module, step: int, shard: int) -> Tensor:
    dtype = next(module.parameters()).dtype
    return module(inputs_of(step, shard, dtype), step, shard).float().square().mean()


def wrap(world: World, case: Case, dtype: torch.dtype = torch.float32, **settings: Any) -> ShardedDataParallel:
    """Build a case's module, of another seed on every rank, and wrap it."""
    net = seeded(case.build, world.rank + 1, dtype)
    units = None if case.units is None else case.units(net)  # type: ignore[arg-type]
    given = {"stage": 3, "units": units, "find_unused_parameters": case.unused, **settings}
    return ShardedDataParallel(net, world.group, **given)


class Alone:
    """One process that trains the same module on all shards."""

    def __init__(self, case: Case, dtype: torch.dtype = torch.float32) -> None:
        self.module = row_major(seeded(case.build, 1, dtype))
        self.unused = case.unused
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-2)

    def gradients(self, step: int, shards: int) -> dict[str, Tensor | None]:
        """Add the gradients of shards in order, divide once, and keep them as `.grad`."""
        total: dict[str, Tensor | None] = {}
        for shard in range(shards):
            shadow = copy.deepcopy(self.module)
            shadow.zero_grad()
            loss_of(shadow, step, shard).backward()
            for name, each in shadow.named_parameters():
                before = total.get(name)
                if each.requires_grad:
                    total[name] = each.grad if before is None else before if each.grad is None else before + each.grad
        for name, each in self.module.named_parameters():
            found = total.get(name)
            if found is None and each.requires_grad and not self.unused:
                found = torch.zeros_like(each)  # what nobody uses later on counts as zeros
            each.grad = found / shards if found is not None and shards > 1 else found
        return {name: each.grad for name, each in self.module.named_parameters() if each.requires_grad}

    def step(self) -> None:
        self.optimizer.step()


def backwards(world: World, model: ShardedDataParallel, step: int, shards: int) -> None:
    """Compute this rank's shards of a step."""
    for shard in range(shards):
        last = shard == shards - 1
        with nullcontext() if last else model.no_sync():
            loss_of(model, step, world.rank * shards + shard).backward()
        if model.exact and not last:
            model.next_shard()


class Watch:
    """Sees how many units, beside the root, have memory at a time."""

    def __init__(self, model: ShardedDataParallel) -> None:
        assert isinstance(model.residency, UnitStates)
        self.unit_states, self.most = model.residency.unit_states, 0
        for unit_state in self.unit_states:
            for flat_parameter in unit_state.flat_parameters:
                flat_parameter.take_memory = self._watched(flat_parameter.take_memory)  # type: ignore[method-assign]

    def _watched(self, take: Callable[[], None]) -> Callable[[], None]:
        def taking() -> None:
            take()
            self.most = max(self.most, len(self.whole()))

        return taking

    def whole(self) -> list[str]:
        return [
            each.unit.name
            for each in self.unit_states[:-1]
            if any(flat_parameter.full.untyped_storage().nbytes() for flat_parameter in each.flat_parameters)
        ]
