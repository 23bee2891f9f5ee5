"""`zero_grad(set_to_none=False)` leaves zeros, with which a step changes parameters, as in one process."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from muster.jobs.world.world import World
from muster.zero import ShardedDataParallel

pytestmark = pytest.mark.ranks


class Skips(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last = nn.Linear(20, 20).double(), nn.Linear(20, 3).double()

    def forward(self, x: Tensor, *, skips: bool) -> Tensor:
        x = torch.tanh(self.first(x))
        return x if skips else self.last(x)


def problems_of(world: World, **settings: Any) -> list[str]:
    """Use a layer in the first step only, step without a backward, give gradients of this rank alone up."""
    module, twin = Skips(), Skips()
    model = ShardedDataParallel(module, world.group, find_unused_parameters=True, **settings)
    optimizer = model.optimizer(torch.optim.AdamW, lr=0.05, weight_decay=0.5)
    reference = torch.optim.AdamW(twin.parameters(), lr=0.05, weight_decay=0.5)
    for step in range(5):
        for each in (model if step % 2 else optimizer, reference):
            each.zero_grad(set_to_none=step == 1)
        if step == 2 and settings.get("accumulate") != "sharded":
            with model.no_sync():
                model(torch.ones(1, 20, dtype=torch.float64), skips=True).sum().backward()
            model.zero_grad(set_to_none=False)
        for rank in range(world.size if step != 3 else 0):
            x = torch.randn(4, 20, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)
            (twin(x, skips=step > 0).pow(2).mean() / world.size).backward()
            if rank == world.rank:
                model(x, skips=step > 0).pow(2).mean().backward()
        optimizer.step()
        reference.step()
    found = model.state_dict()
    return [f"{settings}: {name}" for name, each in twin.state_dict().items() if not torch.allclose(found[name], each)]


CASES: list[dict[str, Any]] = [
    *({"stage": stage, "exact": exact} for stage in (1, 2, 3) for exact in (False, True)),
    {"stage": 2, "accumulate": "sharded"},
    {"stage": 3, "units": []},
]


def problems(world: World) -> list[str]:
    return [each for settings in CASES for each in problems_of(world, **settings)]


def test_zeros_are_gradients_with_which_a_step_changes_parameters(on_ranks):
    assert on_ranks(2, problems) == [[]] * 2
