"""Large gradients on a CPU are sent as autograd made them: the same means, and copies only if necessary."""

from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from muster.ddp import BucketedDDP
from muster.ddp.buckets import FIRST_BYTES, MB, GradientSize, plan_buckets
from muster.jobs.world.world import World
from support.data_parallel import (
    Means,
    backwards,
    gradients_apart,
    gradients_of,
    one_process,
    wrap,
    wrong_gradients,
    wrong_training,
)
from support.data_parallel_models import CASES

EACH = {"bucket_size_mb": 0.0}  # one bucket per gradient


def all_alone(world: World) -> list[str]:
    """Treat gradients of 8 bytes as large."""
    problems = []
    asked = [
        ("plain", {}),
        ("exact", {"exact": True}),
        ("exact shards", {"exact": True, "shards": 2}),
        ("cast", {"communication_dtype": "bfloat16"}),
    ]
    with mock.patch("muster.ddp.gradients.ALONE_BYTES", 8):
        for case in ("toy", "tied", "odd", "tiny", "unused in odd shards"):
            for words, settings in asked:
                found = wrong_gradients(world, "BucketedDDP", case, **EACH, **settings)
                problems += [f"{case}, {words}: {each}" for each in found]
        for steps in (1, 2):  # the second one adds to gradients that the first has left in place
            problems += [f"accumulating, {steps}: {each}" for each in accumulated(world, steps)]
        for optimizer, settings in (("adamw", {}), ("sgd", {"exact": True, "shards": 2})):
            found = wrong_training(world, "BucketedDDP", "toy", optimizer, bucket_size_mb=1e-4, **settings)
            problems += [f"{optimizer}: {each}" for each in found]
    return problems


def accumulated(world: World, micro_batches: int) -> list[str]:
    """Gradients accumulated onto None or onto an earlier step's zeros must be the mean of the ranks' sums."""
    case, model = CASES["toy"], wrap(world, "BucketedDDP", "toy", **EACH)
    backwards(world, model, case, shards=micro_batches)
    found = {name: each.clone() for name, each in gradients_of(model.module).items() if each is not None}
    for each in model.parameters():
        each.grad = each.grad.zero_() if each.grad is not None else None  # set_to_none=False
    backwards(world, model, case, shards=micro_batches)
    wanted = one_process(case, case.build(1), range(world.size * micro_batches))
    sums = Means({name: mean * micro_batches for name, mean in wanted.means.items()}, wanted.largest)
    numbers = 2 * world.size * micro_batches
    return gradients_apart(found, sums, numbers) + gradients_apart(gradients_of(model.module), sums, numbers)


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [1, 3])
def test_gradients_that_travel_alone_become_the_mean_too(on_ranks, world_size):
    assert on_ranks(world_size, all_alone) == [[]] * world_size


def layers(world: World) -> tuple[nn.Module, torch.Tensor]:
    generator = torch.Generator().manual_seed(world.rank)
    module = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    return module, torch.randn(3, 64, generator=generator)


def memory(world: World) -> list[list[bool]]:
    """Return for each gradient whether it lies where autograd put it: large ones, small ones, some with references."""
    answers = []
    for large, keep in ((8, False), (2**30, False), (8, True)):
        module, inputs = layers(world)
        made: dict[nn.Parameter, int] = {}
        kept: list[torch.Tensor] = []

        def note(parameter: nn.Parameter, made=made, kept=kept, keep=keep) -> None:
            made[parameter] = parameter.grad.data_ptr()
            kept += [parameter.grad.detach()] if keep else []

        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(note)
        with mock.patch("muster.ddp.gradients.ALONE_BYTES", large):
            model = BucketedDDP(module, world.group, **EACH)
            model(inputs).square().sum().backward()
        own = torch.autograd.grad(module(inputs).square().sum(), list(module.parameters()))
        assert all(torch.equal(*pair) for pair in zip(kept[::-1], own, strict=False))  # this rank's, not divided yet
        answers.append([each.grad.data_ptr() == made[each] for each in module.parameters()])
    return answers


@pytest.mark.ranks
def test_a_large_gradient_is_not_copied_unless_somebody_else_has_it(on_ranks):
    assert on_ranks(2, memory) == [[[True, True], [False, False], [False, False]]] * 2


SIZES = st.lists(st.builds(lambda n: GradientSize(n, 4), st.integers(0, 2_000_000)), max_size=40)


@given(SIZES, st.floats(0.1, 32), st.integers(1, 8 * MB))
def test_what_is_large_has_a_bucket_of_its_own_where_there_are_several(sizes, bound, large):
    buckets = plan_buckets(sizes, bound, large)
    assert sorted(place for bucket in buckets for place in bucket) == list(range(len(sizes)))
    if len(plan_buckets(sizes, bound)) <= 1:
        assert buckets == plan_buckets(sizes, bound)
        return
    for bucket in buckets:
        assert len(bucket) == 1 or all(sizes[place].bytes < large for place in bucket)
        assert len(bucket) == 1 or sum(sizes[place].bytes for place in bucket) <= bound * MB
    lasts = [bucket[-1] for bucket in buckets]
    assert lasts == sorted(lasts, reverse=True)


def test_a_plan_of_large_and_small_gradients_is_drawn():
    sizes = [GradientSize(count * MB // 4, 4) for count in (1, 1, 9, 9, 1, 1)]
    assert plan_buckets(sizes, 12.0, 4 * MB) == [(5,), (3,), (2,), (4, 1, 0)]
    assert plan_buckets(sizes, 12.0) == [(5,), (4, 3), (2, 1, 0)]
    assert FIRST_BYTES == MB
