"""ShardedOptimizer works with torch's own tools and common habits."""

import copy
import io
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from muster.jobs.world.world import World
from muster.zero import ShardedDataParallel, ShardedOptimizer
from muster.zero.scaling import ShardedGradScaler
from support.refusals import said_by
from support.zero_models import Ragged, ragged_loss, seeded
from support.zero_optimizer import Pair, pair, photograph, unchanged

pytestmark = pytest.mark.ranks


def habits(world: World) -> dict[str, Any]:
    """Use an optimizer as users do; return the results."""
    made = pair("adamw", groups=lambda module: module.named_parameters())
    optimizer, heard = made.optimizer, []
    optimizer.register_step_pre_hook(lambda who, args, kwargs: heard.append(("before", who is optimizer)))
    optimizer.register_step_post_hook(lambda who, args, kwargs: heard.append(("after", who is optimizer)))
    made.draw(0)
    made.step()
    kept = {"steps heard": list(heard)}
    optimizer.register_state_dict_post_hook(lambda who, saved: saved.update(mine=7))
    optimizer.register_load_state_dict_pre_hook(lambda who, saved: heard.append(("load", saved.pop("mine"))))
    optimizer.load_state_dict(optimizer.state_dict())
    kept["load heard"] = heard[2:]
    kept["names"] = optimizer.param_groups[0]["param_names"][:2]
    kept["repr"] = repr(optimizer).split("\n")[:2]
    parameter, state = next(iter(optimizer.state.items()))
    kept["state"] = [isinstance(parameter, nn.Parameter), sorted(state), state["exp_avg"].dim()]
    optimizer.zero_grad(set_to_none=False)
    kept["zeros"] = all(not each.grad.any() for each in made.module.parameters() if each.grad is not None)
    kept["zeros are gradients"] = sum(each.grad is not None for each in made.module.parameters())
    optimizer.zero_grad()
    kept["none"] = all(each.grad is None for each in made.module.parameters())
    kept["refused"] = [
        said_by(lambda: act(optimizer), (TypeError, AttributeError))  # noqa: B023 - called at once
        for act in (copy.deepcopy, pickle.dumps, set_state)
    ]
    kept["problems"] = [*made.apart(), *warmed_up(), *loaded_anew(made)]
    return kept


def set_state(optimizer: ShardedOptimizer) -> None:
    optimizer.state = {1: 2}


def warmed_up() -> list[str]:
    """Warm up a learning rate that is a tensor, which schedulers fill in place, with a cyclic momentum."""
    made = pair("adamw")
    for optimizer in (made.optimizer, made.reference):
        optimizer.param_groups[0]["lr"] = torch.tensor(0.01)
    schedulers = [
        torch.optim.lr_scheduler.LinearLR(each, start_factor=0.25, total_iters=3)
        for each in (made.optimizer, made.reference)
    ]
    for step in range(3):
        made.draw(step)
        made.step()
        for scheduler in schedulers:
            scheduler.step()
    return [f"warm-up: {each}" for each in made.apart()]


def loaded_anew(made: Pair) -> list[str]:
    """Save both dictionaries to a file, with weights_only loading, and read them back."""
    files = []
    for saved in (made.optimizer.state_dict(), made.optimizer.full_state_dict()):
        file = io.BytesIO()
        torch.save(saved, file)
        file.seek(0)
        files.append(torch.load(file, weights_only=True))
    other = pair("adamw", groups=lambda module: module.named_parameters(), seed=2)
    problems = []
    for each in files:
        other.optimizer.load_state_dict(each)
        full = other.optimizer.full_state_dict()
        problems += [
            f"{key} of {number} was not loaded"
            for number, entries in made.optimizer.full_state_dict()["state"].items()
            for key, value in entries.items()
            if not torch.equal(value, full["state"][number][key])
        ]
    return problems


def test_torch_s_tools_and_habits(on_ranks):
    first, second = on_ranks(2, habits)
    assert first["steps heard"] == [["before", True], ["after", True]]
    assert first["load heard"] == [["load", 7]]
    assert first["names"] == ["number", "none"]
    assert first["repr"] == ["ShardedOptimizer of AdamW, rank 0 of 2 (", "Parameter Group 0"]
    assert first["state"] == [True, ["exp_avg", "exp_avg_sq", "step"], 1]
    assert first["zeros"]
    assert first["zeros are gradients"] == 7
    assert first["none"]
    assert "save its state_dict() or full_state_dict()" in first["refused"][0]
    assert "save its state_dict() or full_state_dict()" in first["refused"][1]
    assert "call load_state_dict()" in first["refused"][2]
    assert first["problems"] == second["problems"] == []


def scaled(world: World) -> dict[str, list[Any]]:
    """Scale losses: float32 and float16 gradients, an infinity on one rank only, unscaled explicitly or not."""
    problems, scales = [], []
    for dtype in (torch.float32, torch.float16):
        for first in (False, True):
            if first and dtype == torch.float16:
                continue  # GradScaler itself refuses this
            made = pair("sgd", dtype=dtype)
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
            for step in range(3):
                made.draw(step, scale=1024.0)
                made.follow(1024.0)
                infinite = step == 1 and world.rank == 1  # on one rank only: the hardest case
                if infinite:
                    made.module.up.weight.grad[0, 0] = torch.inf
                before = photograph(made)
                scaler.scale(torch.zeros(()))
                if first:
                    scaler.unscale_(made.optimizer)
                scaler.step(made.optimizer)
                if step == 1:
                    problems += [] if unchanged(made, before) else [f"{dtype}: stepped with an infinity"]
                else:
                    made.reference.step()
                scaler.update()
                scales.append(scaler.get_scale())
                scaler.update(1024.0)
            problems += [f"{dtype}, {first}: {each}" for each in made.apart()]
    return {"problems": problems, "scales": scales}


def test_a_scaled_step_is_skipped_by_all_ranks_or_none(on_ranks):
    first, second = on_ranks(2, scaled)
    assert first["problems"] == second["problems"] == []
    assert second["scales"] == [1024.0, 512.0, 1024.0] * 3


def scaled_shards(world: World) -> list[Any]:
    """Put an infinity into one rank's shard of a wrapper's gradients: all ranks skip, and all lower the scale."""
    model = ShardedDataParallel(seeded(Ragged), stage=2)
    optimizer = model.optimizer(torch.optim.SGD, lr=0.1)
    scaler = ShardedGradScaler("cpu", init_scale=512.0)
    results: list[Any] = []
    for step in range(2):
        scaler.scale(ragged_loss(model, 2 * step + world.rank)).backward()
        if step == 0 and world.rank == 1:
            optimizer.gradients()[0][0] = torch.inf
        wanted = model.full_gradients()
        before = {name: each.detach().clone() for name, each in model.module.named_parameters()}
        scaler.step(optimizer)
        model.synchronize()
        scale = 512.0 if step == 0 else 256.0
        results.append(
            all(
                torch.allclose(each, before[name] - (0.1 * wanted[name] / scale if step else 0.0))
                for name, each in model.module.named_parameters()
                if name in wanted
            )
        )
        scaler.update()
        results.append(scaler.get_scale())
        optimizer.zero_grad()
    return results


def test_an_infinity_in_one_shard_is_one_for_all_ranks(on_ranks):
    assert on_ranks(2, scaled_shards) == [[True, 256.0, True, 256.0]] * 2


def gathered_once(world: World) -> list[int]:
    """Count the gathers of a step: frozen flat tensors are not sent."""
    module = seeded(Ragged)
    optimizer = ShardedOptimizer(module.parameters(), torch.optim.SGD, lr=0.1)
    for each in module.parameters():
        each.grad = torch.ones_like(each) if each.requires_grad else None
    gather, sent = optimizer.source.gather, []
    start = gather.start
    gather.start = lambda flat_parameter, shard, out: (
        sent.append(flat_parameter.names),
        start(flat_parameter, shard, out),
    )[1]
    optimizer.step()
    dist.barrier()
    return [len(optimizer.source.made), len(sent)]


def test_what_does_not_learn_is_not_gathered(on_ranks):
    assert on_ranks(2, gathered_once) == [[2, 1]] * 2
