"""torch.nn.utils.clip_grad_norm_ on a sharded module raises, and says which call to use instead."""

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from muster.jobs.world.world import World
from muster.zero import ShardedDataParallel, ShardedOptimizer

pytestmark = pytest.mark.ranks


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))


def said(call: Any, parameters: Any, most: float) -> str:
    try:
        return f"norm {float(call(parameters, most)):.4f}"
    except RuntimeError as error:
        return str(error)


def step_length(module: nn.Module, before: list[torch.Tensor]) -> float:
    pairs = zip(module.parameters(), before, strict=True)
    return round(float(sum((a.detach() - b).pow(2).sum() for a, b in pairs) ** 0.5), 4)


def habit(world: World, stage: int) -> dict[str, Any]:
    module = net()
    before = [each.detach().clone() for each in module.parameters()]
    model = ShardedDataParallel(module, stage=stage)
    optimizer = model.optimizer(torch.optim.SGD, lr=1.0)
    model(torch.full((2, 4), 10.0)).sum().backward()
    tools = {"norm": clip_grad_norm_, "value": clip_grad_value_}
    found = {name: said(tool, model.parameters(), 0.1) for name, tool in tools.items()}
    found["own norm is large"] = float(optimizer.clip_grad_norm_(0.1)) > 10.0
    found["none"] = all(each.grad is None for each in module.parameters())
    optimizer.step()
    with model.gather_full():
        found["step"] = step_length(module, before)
    optimizer.zero_grad()
    return found


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_clipping_by_habit_fails_on_first_use_and_names_the_call_that_clips(on_ranks, stage):
    first, second = on_ranks(2, habit, stage=stage)
    assert first == second
    for tool in ("norm", "value"):
        assert "call clip_grad_norm_(max_norm) of the wrapper's optimizer" in first[tool]
    assert (first["step"], first["own norm is large"], first["none"]) == (0.1, True, True)


def without_a_wrapper(world: World) -> list[Any]:
    """Clip copies, modules without their wrapper, and parameters of an optimizer without a wrapper."""
    found = []
    for how in ("deepcopy", "pickle", "unwrap", "deleted", "zero_grad", "alone"):
        module = net()
        if how == "alone":
            ShardedOptimizer(module.parameters(), torch.optim.SGD, lr=1.0)
            module(torch.ones(1, 4)).sum().backward()
        else:
            model = ShardedDataParallel(module, stage=2)
            model(torch.ones(1, 4)).sum().backward()
            if how == "deepcopy":
                module = copy.deepcopy(module)
            elif how == "pickle":
                torch.save(module, file := io.BytesIO())
                file.seek(0)
                module = torch.load(file, weights_only=False)
            elif how == "unwrap":
                model.unwrap()
            elif how == "zero_grad":
                model.zero_grad()
            elif how == "deleted":
                del model
            if how != "zero_grad":
                module.zero_grad()
                module(torch.ones(1, 4)).sum().backward()
        found.append(said(clip_grad_norm_, module.parameters(), 0.1))
        found.append(all(type(each) is nn.Parameter for each in module.parameters()))
    return found


def test_a_module_without_a_wrapper_is_clipped_as_ever(on_ranks):
    module = net()
    module(torch.ones(1, 4)).sum().backward()
    norm = said(clip_grad_norm_, module.parameters(), 0.1)
    wanted = [norm, True] * 4 + ["norm 0.0000", True] + [norm, True]
    assert on_ranks(2, without_a_wrapper) == [wanted] * 2


def classes(world: World) -> list[Any]:
    """List the classes of parameters in forwards between steps: torch.compile would recompile if they changed."""
    module, seen = net(), []
    module.register_forward_pre_hook(lambda *_: seen.append({type(each).__name__ for each in module.parameters()}))
    model = ShardedDataParallel(module, stage=2, accumulate="sharded")
    optimizer = model.optimizer(torch.optim.SGD, lr=0.1)
    for _ in range(2):
        for _ in range(2):
            model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    return [sorted(each) for each in seen]


def test_forwards_see_plain_parameters(on_ranks):
    assert on_ranks(2, classes) == [[["Parameter"]] * 4] * 2


def complex_parameters(world: World) -> list[str]:
    """Clip, step and save with complex parameters, of which only some ranks hold elements."""
    sides = []
    for kind in (torch.optim.AdamW, lambda *given, **options: ShardedOptimizer(given[0], torch.optim.AdamW, **options)):
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(3, 2, dtype=torch.complex64).t()), nn.Parameter(torch.randn(40))]
        optimizer, norms = kind(params, lr=0.1), []
        for step in range(2):
            for each in params:
                each.grad = torch.full_like(each, 1.0 + step)
            clip = getattr(optimizer, "clip_grad_norm_", lambda most, its=params: clip_grad_norm_(its, most))
            norms.append(clip(0.5).float())
            optimizer.step()
        state = optimizer.full_state_dict() if isinstance(optimizer, ShardedOptimizer) else optimizer.state_dict()
        sides.append([*norms, *params, *(each["exp_avg"] for each in state["state"].values())])
    return [f"{number}" for number, pair in enumerate(zip(*sides, strict=True)) if not torch.allclose(*pair)]


def test_complex_parameters_are_clipped_on_every_rank(on_ranks):
    assert on_ranks(3, complex_parameters) == [[]] * 3
