"""`zero_grad(set_to_none=False)` leaves zeros, with which a step changes parameters, as in one process."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from muster.jobs.world.world import World
from muster.zero import ShardedDataParallel
from muster.zero.layerwise import Layerwise

pytestmark = pytest.mark.ranks


class Skips(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(20, 20), nn.Linear(20, 3)

    def forward(self, x: Tensor, *, skips: bool) -> Tensor:
        x = torch.tanh(self.first(x))
        return x if skips else self.last(x)


def built(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    module = Skips() if kind is ShardedDataParallel else nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 3))
    return module.double()


def problems_of(world: World, how: str, settings: dict[str, Any]) -> list[str]:
    """Use a layer in the first step only, then accumulate, give a step up, and step without a backward."""
    kind: Any = Layerwise if how == "layerwise" else ShardedDataParallel
    module, twin = built(kind), built(kind)
    model = kind(module, world.group, **settings)
    optimizer = model.optimizer(torch.optim.AdamW, lr=0.05, weight_decay=0.5)
    reference = torch.optim.AdamW(twin.parameters(), lr=0.05, weight_decay=0.5)

    def backward(number: int, **how: Any) -> None:
        for rank in range(world.size):
            x = torch.randn(4, 20, generator=torch.Generator().manual_seed(10 * number + rank), dtype=torch.float64)
            (twin(x, **how).pow(2).mean() / world.size).backward()
            if rank == world.rank:
                loss = model(x, **how).pow(2).mean()
                model.backward(loss) if kind is Layerwise else loss.backward()

    for step in range(5):
        zeroing = model if step % 2 else optimizer
        for each in (zeroing, reference):
            each.zero_grad(set_to_none=step == 1)
        if step != 3:
            backward(step, **({"skips": step > 0} if kind is ShardedDataParallel else {}))
        if step == 2:
            backward(7, **({"skips": True} if kind is ShardedDataParallel else {}))
        if step == 4 and kind is ShardedDataParallel and settings.get("accumulate") != "sharded":
            for each in (model, reference):
                each.zero_grad(set_to_none=False)
            with model.no_sync():
                model(torch.ones(1, 20, dtype=torch.float64), skips=False).sum().backward()
            model.zero_grad(set_to_none=False)
            backward(8, skips=False)
        optimizer.step()
        reference.step()
    found = model.state_dict()
    return [f"{how}: {name}" for name, each in twin.state_dict().items() if not torch.allclose(found[name], each)]


CASES: dict[str, dict[str, Any]] = {
    "layerwise": {},
    **{f"stage {stage}": {"stage": stage, "find_unused_parameters": True} for stage in (1, 2, 3)},
    **{f"stage {stage}, exact": {"stage": stage, "find_unused_parameters": True, "exact": True} for stage in (1, 2, 3)},
    "sharded": {"stage": 2, "find_unused_parameters": True, "accumulate": "sharded"},
    "one tensor": {"stage": 3, "find_unused_parameters": True, "units": []},
}


def problems(world: World) -> list[str]:
    return [each for how, settings in CASES.items() for each in problems_of(world, how, settings)]


def test_zeros_are_gradients_with_which_a_step_changes_parameters(on_ranks):
    assert on_ranks(2, problems) == [[]] * 2
