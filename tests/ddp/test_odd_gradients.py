"""Complex gradients are averaged by every wrapper; sparse ones are refused by name."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from muster import ddp
from muster.jobs.world.world import World
from support.data_parallel import WRAPPERS

pytestmark = pytest.mark.ranks


class Waves(nn.Module):
    """A complex, column-major parameter and a real one."""

    def __init__(self) -> None:
        super().__init__()
        self.waves = nn.Parameter(torch.ones(3, 2, dtype=torch.complex64).t())
        self.level = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.view_as_real(self.waves * x).sum() + self.level.sum()


def complex_means(world: World) -> list[str]:
    """Return gradients that are not the mean of (1 + 2j) and (2 + 4j), conjugated, as in one process."""
    wrong = []
    for wrapper in WRAPPERS:
        for settings in ({}, {"exact": True}, {"communication_dtype": torch.bfloat16}):
            module = Waves()
            model = getattr(ddp, wrapper)(module, world.group, **settings)
            with torch.no_grad():
                factor = torch.tensor(1 + 2j) * (world.rank + 1)
            for shard in range(2 if "exact" in settings else 1):
                if shard:
                    model.next_shard()
                    model(factor).backward()
                else:
                    with model.no_sync() if "exact" in settings else torch.enable_grad():
                        model(factor).backward()
            model.finish_gradient_synchronization()
            found, alone = module.waves.grad, Waves()
            alone(torch.tensor(1.5 + 3j)).backward()
            if not torch.equal(found, alone.waves.grad) or found.stride() != module.waves.stride():
                wrong.append(f"{wrapper}, {settings}: {found}")
            if not torch.equal(module.level.grad, torch.ones(2)):
                wrong.append(f"{wrapper}, {settings}: {module.level.grad}")
    return wrong


def test_complex_gradients_are_averaged_by_every_wrapper(on_ranks):
    assert on_ranks(2, complex_means) == [[]] * 2


def sparse(world: World) -> dict[str, str]:
    said: dict[str, Any] = {}
    for wrapper in WRAPPERS:
        model = getattr(ddp, wrapper)(nn.Embedding(4, 2, sparse=True), world.group)
        try:
            model(torch.tensor([1, 2])).sum().backward()
            model.finish_gradient_synchronization()
        except RuntimeError as error:
            said[wrapper] = str(error)
    return said


def test_sparse_gradients_are_refused_by_name_by_every_wrapper(on_ranks):
    told = "weight: its gradient is sparse, but only dense gradients are averaged; build the layer with sparse=False"
    assert on_ranks(2, sparse) == [dict.fromkeys(WRAPPERS, told)] * 2
