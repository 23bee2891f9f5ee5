"""A pipeline clips by the norm of the whole model, a shared weight counted once."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from muster.jobs.world.world import World
from muster.pipe.pipeline import Pipeline
from muster.pipe.schedules.tables import schedule

pytestmark = pytest.mark.ranks


def tied() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Sequential(
        *(nn.Embedding(7, 4), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 7, bias=False))
    )
    layers[5].weight = layers[0].weight
    return layers


def clipped(world: World, max_norm: float) -> list[str]:
    tokens, targets = torch.arange(8) % 7, (torch.arange(8) * 3) % 7
    alone, problems = tied(), []
    for inputs, wanted in zip(tokens.chunk(4), targets.chunk(4), strict=True):
        (functional.cross_entropy(alone(inputs), wanted) / 4).backward()
    wanted = torch.nn.utils.clip_grad_norm_(alone.parameters(), max_norm)
    layers = tied()
    pipeline = Pipeline(layers, schedule("1f1b", world.size, 4), loss=functional.cross_entropy, exact=True)
    pipeline.step(tokens, targets)
    norm = pipeline.clip_grad_norm_(max_norm)
    if abs(float(norm) - float(wanted)) > 1e-6:
        problems.append(f"the norm is {float(norm)}, wanted {float(wanted)}")
    gradients = {name: each.grad for name, each in alone.named_parameters(remove_duplicate=False)}
    for name, each in pipeline.module.named_parameters():
        apart = float((each.grad - gradients[name]).abs().max())
        problems += [f"{name} is off by {apart}"] * (apart > 1e-6)
    for wrong in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="max_norm must be a positive number"):
            pipeline.clip_grad_norm_(wrong)
    return problems


@pytest.mark.parametrize("max_norm", [0.05, 1e3])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_norm_is_that_of_the_whole_model(on_ranks, ranks: int, max_norm: float) -> None:
    assert on_ranks(ranks, clipped, max_norm=max_norm) == [[]] * ranks
