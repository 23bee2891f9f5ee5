"""Stage 3 trains as one process does, whatever units are, and holds two of them at a time beside the root."""

from typing import Any

import pytest
import torch

from jobs.train.world import World
from support.data_parallel import same_bits
from support.zero_units import CASES, Alone, Case, Watch, backwards, wrap
from zero import ShardedDataParallel

pytestmark = pytest.mark.ranks

STEPS = 5


def bytes_whole(model: ShardedDataParallel) -> int:
    return sum(home.full.untyped_storage().nbytes() for home in model.homes)


def held_wrongly(model: ShardedDataParallel) -> list[str]:
    """Say what a rank holds between steps that it should not."""
    problems = [] if bytes_whole(model) == 0 else [f"{bytes_whole(model)} bytes of whole parameters"]
    with_gradients = [name for name, each in model.module.named_parameters() if each.grad is not None]
    problems += [f"whole gradients of {with_gradients}"] if with_gradients else []
    for home in model.homes:
        each = home.full_bytes // model.ranks
        for what, tensor in (("parameters", home.shard), ("gradients", home.grad)):
            if tensor is not None and tensor.untyped_storage().nbytes() != each:
                problems.append(f"{home.names[0]}: {tensor.untyped_storage().nbytes()} bytes of {what}, not {each}")
    return problems


def wrong_training(world: World, case: Case, shards: int = 2, **settings: Any) -> list[str]:
    """Train; every gradient, and the parameters in the end, must have the bits of one process."""
    dtype = settings.pop("dtype", torch.float32)
    exact = settings.setdefault("exact", True)
    model, alone = wrap(world, case, dtype, **settings), Alone(case, dtype)
    optimizer = model.optimizer(torch.optim.AdamW, lr=1e-2, masters=False)
    watch, problems = Watch(model), []
    for step in range(STEPS):
        optimizer.zero_grad()
        backwards(world, model, step, shards)
        problems += [f"step {step}: {each}" for each in held_wrongly(model)]
        wanted, found = alone.gradients(step, world.size * shards), model.full_gradients()
        for name, mean in wanted.items():
            gradient = found.get(name)
            if mean is None or gradient is None:
                problems += [] if mean is gradient else [f"step {step}: {name} has {gradient}, wanted {mean}"]
            elif exact and not same_bits(gradient, mean):
                problems.append(f"step {step}: {name} is off by {float((gradient - mean).abs().max()):.1e}")
            elif not exact:
                torch.testing.assert_close(gradient, mean * shards)
                dict(alone.module.named_parameters())[name].grad = gradient
        optimizer.step()
        alone.step()
        problems += [f"after step {step}: {each}" for each in held_wrongly(model)]
    most = watch.most
    state = model.state_dict()
    problems += [name for name, each in alone.module.named_parameters() if not same_bits(state[name], each)]
    if most > case.at_most and settings.get("reshard_after_forward", True):
        problems.append(f"{most} units whole at a time, {case.at_most} wanted")
    return problems[:4]


def every_case(world: World, names: list[str], **settings: Any) -> dict[str, list[str]]:
    found = {name: wrong_training(world, CASES[name], **settings) for name in names}
    return {name: problems for name, problems in found.items() if problems}


@pytest.mark.parametrize("ranks", [1, 3])
def test_gradients_and_parameters_have_the_bits_of_one_process(on_ranks, ranks):
    assert on_ranks(ranks, every_case, names=list(CASES)) == [{}] * ranks
