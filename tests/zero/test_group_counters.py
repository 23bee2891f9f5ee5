"""Values that an inner optimizer writes into its groups, like schedule-free's `k`, survive steps, saves and loads."""

from typing import Any

import pytest
import torch
from torch import nn

from muster.ddp import BucketedDDP
from muster.jobs.world.world import World
from muster.zero import ShardedDataParallel, ShardedOptimizer

pytestmark = pytest.mark.ranks


class Slowing(torch.optim.Optimizer):
    """Steps by lr / k, where k counts the steps in the group itself."""

    elementwise = True

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "k": 1, "train_mode": False})

    def train(self) -> None:
        for group in self.param_groups:
            group["train_mode"] = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    each -= group["lr"] / group["k"]
            group["k"] += 1
            group.setdefault("steps_begun", []).append(group["k"])


def built(stage: int) -> tuple[nn.Module, ShardedOptimizer]:
    module = nn.Linear(5, 3).double()
    for each in module.parameters():
        nn.init.ones_(each)
    if stage == 0:
        return BucketedDDP(module), ShardedOptimizer(module.parameters(), Slowing)
    model = ShardedDataParallel(module, stage=stage)
    return model, model.optimizer(Slowing)


def step(model: nn.Module, optimizer: ShardedOptimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 5, dtype=torch.float64)).sum().backward()
    optimizer.step()


def weights(model: nn.Module) -> list[float]:
    return sorted({round(float(each), 4) for part in model.state_dict().values() for each in part.view(-1)})


def counted(world: World) -> list[Any]:
    """Return for each stage the weights after four steps, the counter (visible, saved, loaded), and later weights."""
    found = []
    for stage in (0, 1, 2, 3):
        model, optimizer = built(stage)
        for _ in range(4):
            step(model, optimizer)
        shown = optimizer.param_groups[0]
        saved = [optimizer.state_dict(), optimizer.full_state_dict()]
        found.append(
            [weights(model), shown["k"], shown["steps_begun"], [each["param_groups"][0]["k"] for each in saved]]
        )
        for each in saved:
            other, loading = built(stage)
            step(other, loading)
            loading.load_state_dict(each)
            step(other, loading)  # 1 - 0.1 / 1 - 0.1 / 5
            found[-1].append([weights(other), loading.inner.param_groups[0]["k"]])
    return found


def test_a_counter_in_a_group_counts_and_is_saved(on_ranks):
    wanted = [[0.7917], 5, [2, 3, 4, 5], [5, 5], [[0.88], 6], [[0.88], 6]]
    assert on_ranks(2, counted) == [[wanted] * 4] * 2


def both_sides(world: World) -> list[Any]:
    """Change a setting in the outer groups, then in both, then in the inner ones outside of a step."""
    model, optimizer = built(2)
    step(model, optimizer)
    optimizer.param_groups[0]["lr"] = 0.2
    step(model, optimizer)
    found = [weights(model)]  # 1 - 0.1 - 0.2 / 2
    optimizer.param_groups[0]["k"] = 1
    optimizer.inner.param_groups[0]["k"] = 7
    optimizer.inner.train()
    saved = optimizer.state_dict()["param_groups"][0]
    step(model, optimizer)
    found.append([weights(model), saved["k"], saved["train_mode"], optimizer.param_groups[0]["train_mode"]])
    optimizer.add_param_group({"params": []})
    step(model, optimizer)
    return [*found, [group["k"] for group in optimizer.param_groups]]


def test_what_the_caller_sets_counts_and_nothing_else_is_overwritten(on_ranks):
    assert on_ranks(2, both_sides) == [[[0.8], [[0.6], 1, True, True], [3, 2]]] * 2
