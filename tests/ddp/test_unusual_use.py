"""Unusual uses of wrappers: each gives the mean over all ranks or an error message, never one rank's gradient."""

import math
from collections.abc import Callable, Iterable, Iterator

import pytest
import torch
from torch import nn

from muster import ddp
from muster.ddp.base import DataParallel
from muster.jobs.world.world import World
from support.data_parallel import (
    WRAPPERS,
    backwards,
    gradients_apart,
    gradients_of,
    one_process,
    same_bits,
    states_apart,
    wrap,
)
from support.data_parallel_models import CASES, ToyModel, normal

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

TOY = CASES["toy"]


def apart(world: World, model: DataParallel, serial: nn.Module, times: int = 1, offset: int = 0) -> list[str]:
    """Compare with `times` the mean over two ranks of one shard each, bit for bit."""
    wanted = one_process(TOY, serial, range(offset, offset + world.size))
    means = {name: None if mean is None else mean * times for name, mean in wanted.means.items()}
    return gradients_apart(gradients_of(model.module), type(wanted)(means), 0)


def frozen_when_wrapped(world: World, wrapper: str) -> Iterator[str]:
    module, serial = TOY.build(world.rank + 1).requires_grad_(False), TOY.build(1)
    model = getattr(ddp, wrapper)(module, world.group)
    for word in ("thawed", "thawed again"):
        module.requires_grad_(True)
        model.zero_grad()
        backwards(world, model, TOY)
        yield from (f"{word}: {each}" for each in apart(world, model, serial))
        module.requires_grad_(False)
        TOY.loss(model, 0)  # a forward with all parameters frozen


def past_the_wrapper(world: World, wrapper: str) -> Iterator[str]:
    """Call the module itself instead of the wrapper; then two forwards, with each backward synchronized separately."""
    model, serial = wrap(world, wrapper, "toy"), TOY.build(1)
    TOY.loss(model.module, world.rank).backward()
    model.finish_gradient_synchronization()
    yield from (f"the module's forward: {each}" for each in apart(world, model, serial))
    losses = [TOY.loss(model, world.rank), TOY.loss(model, world.rank + world.size)]
    for place, loss in enumerate(losses):
        model.zero_grad()
        loss.backward()
        model.finish_gradient_synchronization()
        found = apart(world, model, serial, offset=place * world.size)
        yield from (f"backward {place}: {each}" for each in found)


def all_within_no_sync(world: World, wrapper: str) -> Iterator[str]:
    model, serial = wrap(world, wrapper, "toy"), TOY.build(1)
    with model.no_sync():
        for _ in range(2):
            TOY.loss(model, world.rank).backward()
    model.finish_gradient_synchronization()
    yield from apart(world, model, serial, times=2)


def shard_closed_too_often(world: World) -> list[str]:
    said = []
    for wrapper in WRAPPERS:
        model = wrap(world, wrapper, "toy", exact=True)
        with model.no_sync():
            TOY.loss(model, world.rank).backward()
        model.next_shard()
        for what in (model.finish_gradient_synchronization, model.next_shard):
            with pytest.raises(RuntimeError, match="shard") as error:
                what()
            said.append(str(error.value))
    return said


def test_a_virtual_shard_without_gradients_is_refused(on_ranks):
    for said in on_ranks(2, shard_closed_too_often):
        assert all("next_shard()" in each for each in said)
        assert len(said) == 2 * len(WRAPPERS)


def step_given_up(world: World, wrapper: str) -> Iterator[str]:
    model, serial = wrap(world, wrapper, "toy", exact=True), TOY.build(1)
    with model.no_sync():
        TOY.loss(model, 77).backward()
        model.next_shard()  # then reading the next batch failed
    model.zero_grad()
    backwards(world, model, TOY)
    yield from apart(world, model, serial)


def another_head(world: World, wrapper: str) -> Iterator[str]:
    model = wrap(world, wrapper, "toy")
    backwards(world, model, TOY)
    model.module.fc2 = nn.Linear(20, 4)
    nn.init.constant_(model.module.fc2.weight, 0.5 + world.rank)
    nn.init.constant_(model.module.fc2.bias, float(world.rank))
    serial = TOY.build(1)
    serial.fc2 = nn.Linear(20, 4)
    nn.init.constant_(serial.fc2.weight, 0.5)
    nn.init.constant_(serial.fc2.bias, 0.0)
    model.zero_grad()
    backwards(world, model, TOY)
    yield from states_apart(model.state_dict(), serial.state_dict())
    yield from apart(world, model, serial)


def gradient_moved(world: World, wrapper: str) -> Iterator[str]:
    """Gradients stay views of their buckets if a user assigns `.grad.data` or calls the inner module."""
    model, serial = wrap(world, wrapper, "toy"), TOY.build(1)
    for word in ("scaled by hand", "another type"):
        backwards(world, model, TOY)
        for parameter in model.parameters():
            parameter.grad.data = parameter.grad.data * 0.5
        model.zero_grad(set_to_none=False)
        if word == "another type":
            model.module.double()
            serial.double()
        inputs = torch.randn(3, 10, generator=torch.Generator().manual_seed(100 + world.rank))
        model(inputs.to(model.module.fc1.weight.dtype)).square().sum().backward()
        model.finish_gradient_synchronization()
        serial.zero_grad()
        for shard in range(world.size):
            inputs = torch.randn(3, 10, generator=torch.Generator().manual_seed(100 + shard))
            serial(inputs.to(serial.fc1.weight.dtype)).square().sum().backward()
        for name, parameter in serial.named_parameters():
            found = gradients_of(model.module)[name]
            if not torch.allclose(found, parameter.grad / world.size, rtol=1e-5, atol=1e-5):
                yield f"{word}: {name}"
        model.zero_grad()


def refused(world: World, wrapper: str, settings: dict) -> str:
    values = {"int32": torch.int32, "bool": torch.bool, "complex64": torch.complex64, "nan": math.nan, "inf": math.inf}
    given = {name: values.get(value, value) for name, value in settings.items()}
    with pytest.raises(ValueError, match=next(iter(settings))) as error:
        getattr(ddp, wrapper)(ToyModel(), world.group, **given)
    return str(error.value)


@pytest.mark.parametrize("given", ["int32", "bool", "complex64", "bf16"])
def test_gradients_are_sent_as_floating_types_only(on_ranks, given):
    for wrapper in ("AllReduce", "BucketedDDP"):
        (said,) = on_ranks(1, refused, wrapper=wrapper, settings={"communication_dtype": given})
        assert said.startswith("communication_dtype must be a floating torch.dtype or None, got ")


@pytest.mark.parametrize("given", ["nan", "inf", "25", True, -1])
def test_a_bucket_size_must_be_a_number_of_mb(on_ranks, given):
    (said,) = on_ranks(1, refused, wrapper="BucketedDDP", settings={"bucket_size_mb": given})
    assert said.startswith("bucket_size_mb must be a number of MB, or None for one bucket, got ")


def wrapped_otherwise(world: World) -> list[str]:
    """Rank 1 requests something else each time."""
    others: list[tuple[str, dict]] = [
        ("BucketedDDP", {"exact": True}),
        ("BucketedDDP", {"communication_dtype": torch.bfloat16}),
        ("BucketedDDP", {"bucket_size_mb": 1.0}),
        ("BucketedDDP", {"find_unused_parameters": True}),
        ("AllReduce", {}),
    ]
    said = []
    for wrapper, settings in others:
        mine, asked = (getattr(ddp, wrapper), settings) if world.rank == 1 else (ddp.BucketedDDP, {})
        with pytest.raises(ValueError, match="wrappers differ") as error:
            mine(ToyModel(), world.group, **asked)
        said.append(str(error.value))
    return said


def test_ranks_that_wrap_in_different_ways_are_told_how(on_ranks):
    there, here = on_ranks(2, wrapped_otherwise)
    settings = [
        ("exact=False", "exact=True"),
        ("communication_dtype=None", "communication_dtype=torch.bfloat16"),
        ("bucket_size_mb=25.0", "bucket_size_mb=1.0"),
        ("find_unused_parameters=False", "find_unused_parameters=True"),
        ("wrapper=BucketedDDP", "wrapper=AllReduce"),
    ]
    for (zero, one), first, second in zip(settings, there, here, strict=True):
        assert f"setting {zero} on rank 0 (here) but setting {one} on rank 1; " in first
        assert f"setting {zero} on rank 0 but setting {one} on rank 1 (here); " in second


def two_in_one_backward(world: World) -> list[str]:
    """An encoder and a decoder with separate wrappers on one group: their exact sums must not mix."""
    problems = []
    for wrapper in WRAPPERS:
        ends = [nn.Linear(10, 10, bias=False), nn.Linear(10, 10, bias=False)]
        for end in ends:
            nn.init.eye_(end.weight)
        first, second = (getattr(ddp, wrapper)(end, world.group, exact=True) for end in ends)
        alone = nn.Sequential(*(nn.Linear(10, 10, bias=False) for _ in range(2)))
        for end in alone:
            nn.init.eye_(end.weight)
        second(torch.tanh(first(normal(first, world.rank, 3, 10)))).square().sum().backward()
        for model in (first, second):
            model.finish_gradient_synchronization()
        for shard in range(world.size):
            inputs = normal(alone, shard, 3, 10)
            alone[1](torch.tanh(alone[0](inputs))).square().sum().backward()
        for end, serial in zip(ends, alone, strict=True):
            if not same_bits(end.weight.grad, serial.weight.grad / world.size):
                problems.append(wrapper)
    return problems


def test_two_wrappers_may_share_a_group_and_a_backward(on_ranks):
    assert on_ranks(3, two_in_one_backward) == [[]] * 3


CHECKS: dict[str, Callable[[World, str], Iterable[str]]] = {
    "a module that is all frozen may be thawed": frozen_when_wrapped,
    "whatever the forward was, to ask for the end synchronizes": past_the_wrapper,
    "gradients that came within no_sync alone are synchronized when asked for": all_within_no_sync,
    "virtual shards of a step that was given up are forgotten with the gradients": step_given_up,
    "a layer that is replaced becomes that of rank 0": another_head,
    "gradients whose memory was changed are averaged all the same": gradient_moved,
}


def checked(world: World, what: str) -> list[str]:
    return [f"{wrapper}: {each}" for wrapper in WRAPPERS for each in CHECKS[what](world, wrapper)]


@pytest.mark.parametrize("what", CHECKS)
def test_of_every_wrapper(on_ranks, what):
    assert on_ranks(2, checked, what=what) == [[]] * 2
