"""ShardedOptimizer: its steps equal those of an optimizer that is not sharded, and its state exists only once."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from muster.ddp import BucketedDDP
from muster.jobs.world.world import World
from muster.zero import ShardedOptimizer, sources
from muster.zero.sources import Alone
from support.data_parallel import parts_from_rank_0
from support.refusals import said_by
from support.zero_checks import written, wrong_events, wrong_steps
from support.zero_models import OPTIMIZERS, Ragged, Several, own_groups, ragged_loss
from support.zero_optimizer import pair

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

SEVERAL = [torch.float32, torch.bfloat16, torch.float64, torch.float16]


def all_optimizers(world: World) -> list[str]:
    return [f"{name}: {each}" for name in OPTIMIZERS for each in wrong_steps(pair(name, groups=own_groups), steps=2)]


def test_every_elementwise_optimizer_steps_as_if_it_were_not_sharded(on_ranks):
    assert on_ranks(3, all_optimizers) == [[]] * 3


def events(world: World) -> list[str]:
    return wrong_events(world, ["sgd", "adamw fused"])


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_an_eventful_training_is_that_of_one_process(on_ranks, ranks):
    assert on_ranks(ranks, events) == [[]] * ranks


def shares(world: World) -> list[int]:
    """Return the number of state elements that this rank holds, for a model of two types."""
    made = pair("adamw", build=lambda: Several([torch.float32, torch.float64] * 3))
    made.draw(0)
    made.step()
    return [
        made.own_elements(),
        sum(each.numel() for each in made.module.parameters()),
        len(made.optimizer.source.made),
    ]


def test_state_is_balanced_by_elements(on_ranks):
    held, wholes, flats = zip(*on_ranks(4, shares), strict=True)
    assert sum(held) == 2 * wholes[0]
    assert flats == (2, 2, 2, 2)
    gaps = 2 * 6 * 15  # tensors begin at multiples of 64 bytes
    assert max(held) <= 2 * (wholes[0] / 4 + 16 * flats[0]) + gaps
    assert min(held) > 0


def small_flats(world: World) -> list[Any]:
    """Train with flat tensors of at most 300 bytes: each larger parameter gets one of its own."""
    with mock.patch.object(sources, "FLAT_MB", 300 / 2**20):
        made = pair("adamw")
    source = made.optimizer.source
    assert isinstance(source, Alone)
    fits = all(
        flat_parameter.layout.length * 4 <= 512 or len(flat_parameter.parameters) == 1 for flat_parameter in source.made
    )
    return [len(source.made), fits, wrong_steps(made)]


def test_flat_tensors_are_bounded_so_that_no_model_is_there_twice(on_ranks):
    assert on_ranks(3, small_flats) == [[6, True, []]] * 3


def subgroup(world: World) -> list[str]:
    """Train on ranks 0 and 2; rank 1 is refused."""
    group = dist.new_group([0, 2])
    if world.rank == 1:
        return [said_by(lambda: ShardedOptimizer(Ragged().parameters(), torch.optim.SGD, group, lr=0.1), ValueError)]
    made = pair("sgd", group=group)
    problems = wrong_steps(made)
    at_first = made.optimizer.consolidate_state_dict(0)  # a rank of the group, not of the job
    at_second = made.optimizer.consolidate_state_dict(1)
    return [
        *problems,
        *([] if [at_first is None, at_second is None] == [world.rank != 0, world.rank != 2] else ["who"]),
    ]


def test_a_group_of_some_ranks_trains_and_others_are_refused(on_ranks):
    first, outside, last = on_ranks(3, subgroup)
    assert (first, last) == ([], [])
    assert outside[0].startswith("rank 1 is not in the given process group")


def all_reduce(module: nn.Module, world: World) -> None:
    for each in module.parameters():
        if each.grad is not None:
            dist.all_reduce(each.grad)
            each.grad /= world.size


WRAPPERS: dict[str, Callable[[nn.Module], Any]] = {
    "by hand": nn.Identity,
    "torch": DistributedDataParallel,
    "torch, views": lambda module: DistributedDataParallel(module, gradient_as_bucket_view=True),
    "ours": BucketedDDP,
}


def synchronized(world: World) -> list[str]:
    """Train after each kind of gradient synchronization, with two micro-batches."""
    problems = []
    for name, wrap in WRAPPERS.items():
        made = pair("adamw fused")
        wrapper = wrap(made.module)
        run = made.module if name == "by hand" else wrapper
        for step in range(3):
            made.optimizer.zero_grad(set_to_none=step % 2 == 0)
            shard = 2 * (step * world.size + world.rank)
            with wrapper.no_sync() if name != "by hand" else nullcontext():
                ragged_loss(run, shard).backward()
            ragged_loss(run, shard + 1).backward()
            if name == "by hand":
                all_reduce(made.module, world)
            made.follow()
            made.step()
        problems += [f"{name}: {each}" for each in (*made.apart(), *parts_from_rank_0(world, made.module))]
    return problems


@pytest.mark.parametrize("ranks", [2, 3])
def test_any_synchronization_may_come_before_it(on_ranks, ranks):
    assert on_ranks(ranks, synchronized) == [[]] * ranks


def in_types(world: World) -> list[str]:
    problems = []
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        for masters in (True, False):
            made = pair("adamw", dtype=dtype, masters=masters, groups=own_groups)
            problems += [f"{dtype}, masters {masters}: {each}" for each in wrong_steps(made)]
    for masters in (True, False):
        made = pair("sgd", build=lambda: Several(SEVERAL), masters=masters)
        problems += [f"several, masters {masters}: {each}" for each in wrong_steps(made)]
    made = pair("adamw", dtype=torch.bfloat16)
    kept = made.optimizer.held_state()
    if {(each.key, each.tensor.dtype) for each in kept} != {("master", torch.float32)}:
        problems.append(f"kept before the first step: {kept}")
    return problems


def test_types_of_parameters_with_masters_and_without(on_ranks):
    assert on_ranks(2, in_types) == [[]] * 2


def written_between(world: World) -> list[str]:
    return written(world)


def test_what_is_written_to_parameters_between_steps_counts(on_ranks):
    assert on_ranks(2, written_between) == [[]] * 2


def empty_shards(world: World) -> list[Any]:
    """Train a single number on four ranks: three of them hold nothing."""
    parameter = nn.Parameter(torch.tensor(2.0))
    optimizer = ShardedOptimizer([parameter], torch.optim.AdamW, lr=0.1, fused=True)
    twin = nn.Parameter(torch.tensor(2.0))
    reference = torch.optim.AdamW([twin], lr=0.1, fused=True)
    for step in range(2):
        for each in (parameter, twin):
            each.grad = torch.tensor(1.0 + step)
        optimizer.clip_grad_norm_(10.0)
        optimizer.step()
        reference.step()
    state = optimizer.full_state_dict()
    optimizer.load_state_dict(state)
    shown: Tensor = state["state"][0]["exp_avg"]
    return [torch.equal(parameter, twin), len(optimizer.state), len(optimizer.held_state()), list(shown.shape)]


def test_ranks_without_an_element_take_part(on_ranks):
    assert on_ranks(4, empty_shards) == [[True, 1, 3, []], *[[True, 0, 0, []]] * 3]
