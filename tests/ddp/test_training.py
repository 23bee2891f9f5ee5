"""Three optimizer steps on several ranks equal those of one process that computes all shards itself.

VGG-11 has batch norm. Each shard is normalized with its own mean and variance, in one process as on several ranks, so
gradients can be equal. Running statistics do not affect gradients, and every rank keeps those of its own shards
(`test_running_statistics_are_each_ranks_own`). VGG has all its layers here, with an eighth of the channels.
"""

import pytest
import torch

from muster.jobs.world.world import World
from support.data_parallel import (
    WRAPPERS,
    backwards,
    same_bits,
    states_apart,
    wrap,
    wrong_training,
)
from support.data_parallel_models import CASES

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

EVERY_WRAPPER = pytest.mark.parametrize("wrapper", WRAPPERS)


def all_training(world: World, wrapper: str, runs: list[list[str]], steps: int = 3, **settings) -> list[str]:
    problems = {(case, how): wrong_training(world, wrapper, case, how, steps, **settings) for case, how in runs}
    return [f"{case} by {how}: {each}" for (case, how), found in problems.items() for each in found]


RUNS = [("toy", "sgd"), ("toy", "adamw"), ("gpt", "adamw")]


def alone(world: World) -> list[str]:
    return [f"{wrapper}: {each}" for wrapper in WRAPPERS for each in all_training(world, wrapper, RUNS)]


def test_three_steps_of_one_rank_are_those_of_no_wrapper(on_ranks):
    assert on_ranks(1, alone) == [[]]


@EVERY_WRAPPER
@pytest.mark.parametrize("world_size", [2, 4])
def test_three_steps_are_those_of_one_process(on_ranks, wrapper, world_size):
    runs = [*RUNS, ("unused in odd shards", "sgd")]
    assert on_ranks(world_size, all_training, wrapper=wrapper, runs=runs) == [[]] * world_size


def near_and_exact(world: World, wrapper: str) -> list[str]:
    return [
        *all_training(world, wrapper, [("vgg11", "sgd")], steps=2),
        *all_training(world, wrapper, [("odd", "adamw"), ("tied", "sgd")], exact=True, shards=2),
        *all_training(world, wrapper, [("vgg11", "sgd")], exact=True),
        *all_training(world, wrapper, [("gpt", "adamw")], exact=True),
    ]


@EVERY_WRAPPER
def test_steps_of_exact_sums_have_the_bits_of_one_process_and_vgg11_is_near(on_ranks, wrapper):
    assert on_ranks(3, near_and_exact, wrapper=wrapper) == [[]] * 3


def running_statistics(world: World) -> list[str]:
    case = CASES["vgg11"]
    problems = []
    for wrapper in WRAPPERS:
        model = wrap(world, wrapper, "vgg11")
        backwards(world, model, case)
        alone = case.build(1)
        case.loss(alone, world.rank)
        problems += states_apart(dict(model.named_buffers()), dict(alone.named_buffers()))
    return problems


def test_running_statistics_are_each_ranks_own(on_ranks):
    assert on_ranks(2, running_statistics) == [[]] * 2


def whole_vgg11(world: World) -> list[str]:
    from muster import ddp
    from muster.jobs.models.shapes import VGG_SHAPES
    from muster.jobs.train.models.vgg import build_vgg

    model = ddp.BucketedDDP(build_vgg(VGG_SHAPES["vgg11"], world.rank), world.group, bucket_size_mb=8)
    loss = CASES["vgg11"].loss
    loss(model, world.rank).backward()
    total: list[torch.Tensor] = []
    serial = build_vgg(VGG_SHAPES["vgg11"], 0)
    for shard in range(world.size):
        serial.zero_grad()
        loss(serial, shard).backward()
        gradients = [each.grad for each in serial.parameters()]
        total = [a + b for a, b in zip(total, gradients, strict=True)] if total else gradients
    found = [(name, each.grad) for name, each in model.named_parameters()]
    return [name for (name, grad), sum_ in zip(found, total, strict=True) if not same_bits(grad, sum_ / world.size)]


def test_vgg11_in_its_full_width_has_the_gradient_of_one_process(on_ranks):
    assert on_ranks(2, whole_vgg11) == [[]] * 2
