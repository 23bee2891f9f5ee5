"""Parameters without a gradient: a custom function returned None for them, or a later step skipped their layer."""

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from muster import ddp
from muster.jobs.world.world import World
from muster.zero import ShardedDataParallel
from support.data_parallel import WRAPPERS
from support.refusals import said_by

pytestmark = pytest.mark.ranks

CLASSES = [*WRAPPERS, "stage 1", "stage 2", "stage 3"]
WARNING = "got no gradient in this step on any rank"


class Affine(torch.autograd.Function):
    """A linear layer that returns None as the gradient of its weight, its bias or neither."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, without: str) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.without = without
        return x @ weight.t() + bias

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        of_weight = None if "weight" in ctx.without else gradient.t() @ x
        return gradient @ weight, of_weight, None if "bias" in ctx.without else gradient.sum(0), None


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(20, 20) / 4), nn.Parameter(torch.randn(20))
        self.without = ""

    def forward(self, x: Tensor) -> Tensor:
        return Affine.apply(x, self.weight, self.bias, self.without)


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer() for _ in range(4))).double()


def wrapped(world: World, name: str, module: nn.Module, **settings: Any) -> tuple[Any, torch.optim.Optimizer]:
    """Return the wrapper and its optimizer."""
    options = {"lr": 0.05, "weight_decay": 0.5}
    if name in WRAPPERS:
        model = getattr(ddp, name)(module, world.group, **settings)
        return model, torch.optim.AdamW(module.parameters(), **options)
    model = ShardedDataParallel(module, world.group, stage=int(name[-1]), bucket_size_mb=0.002, **settings)
    return model, model.optimizer(torch.optim.AdamW, **options)


def loss_of(model: nn.Module, number: int) -> Tensor:
    x = torch.randn(3, 20, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
    return model(x).pow(2).mean()


NONE: list[tuple[str, ...]] = [  # for each rank, the layer and parameter without a gradient; first in steps 0 and 1
    ("1.bias", "1.bias"),
    ("1.bias 3.weight", "1.bias"),
    ("", "0.weight 0.bias 2.bias"),
    ("0.weight 1.weight 2.weight 3.weight 0.bias 1.bias 2.bias 3.bias", "2.bias"),
]


def nones(world: World, name: str) -> Iterator[str]:
    """Train with parameters whose gradient is None on some ranks, or on all; yield what differs from one process."""
    module, twin = layers(), layers()
    settings: list[dict[str, Any]] = [{}, {"exact": True}]
    for extra in settings:
        model, optimizer = wrapped(world, name, module, find_unused_parameters=True, **extra)
        reference = torch.optim.AdamW(twin.parameters(), lr=0.05, weight_decay=0.5)
        for step, without in enumerate(NONE):
            optimizer.zero_grad()
            reference.zero_grad()
            for rank in range(world.size):
                for place in range(4):
                    said = [each[2:] for each in without[rank].split() if each.startswith(str(place))]
                    twin[place].without = " ".join(said)
                    if rank == world.rank:
                        module[place].without = " ".join(said)
                (loss_of(twin, step * world.size + rank) / world.size).backward()
            loss_of(model, step * world.size + world.rank).backward()
            model.finish_gradient_synchronization()
            optimizer.step()
            reference.step()
        if name in WRAPPERS:
            yield from (
                f"{name}: {key}: .grad is {'not ' if each.grad is None else ''}None in one process"
                for key, each in twin.named_parameters()
                if (each.grad is None) != (module.get_parameter(key).grad is None)
            )
        found, wanted = model.state_dict(), twin.state_dict()
        yield from (f"{name}, {extra}: {key}" for key in wanted if not torch.allclose(found[key], wanted[key]))
        module = model.unwrap() if hasattr(model, "unwrap") else module
        del model, optimizer


def every_none(world: World) -> list[str]:
    return [problem for name in CLASSES for problem in nones(world, name)]


def test_gradients_of_none_train_as_in_one_process(on_ranks):
    assert on_ranks(2, every_none) == [[]] * 2


def none_everywhere(world: World) -> dict[str, str]:
    said = {}
    for name in CLASSES:
        module = layers()
        module[1].without = "bias"
        model, _ = wrapped(world, name, module)
        said[name] = said_by(lambda: synchronized(model), RuntimeError)  # noqa: B023 - called at once
    return said


def synchronized(model: Any) -> None:
    loss_of(model, 0).backward()
    model.finish_gradient_synchronization()


def test_without_the_option_a_gradient_of_none_on_all_ranks_is_refused_by_name(on_ranks):
    first, second = on_ranks(2, none_everywhere)
    assert first == second
    wanted = "1 of 8 parameters got no gradient on any rank: 1.bias; "
    assert [name for name in CLASSES if not first[name].startswith(wanted)] == []


class Skips(nn.Module):
    """Layers; `forward` runs only the first and those that it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()

    def forward(self, x: Tensor, used: list[int]) -> Tensor:
        for place, layer in enumerate(self.layers):
            x = layer(x) if place in (0, *used) else x
        return x


SKIPPING = {
    "on all ranks": [([1, 2, 3], [1, 2, 3]), ([1, 3], [1, 3]), ([1], [1])],
    "on one rank": [([1, 2, 3], [1, 2, 3]), ([1, 2, 3], [1]), ([1, 2, 3], [1])],
    "never": [([1, 2, 3], [1, 2, 3]), ([1, 2, 3], [1, 2, 3]), ([1, 2, 3], [1, 2, 3])],
}


def warned(world: World, name: str, which: str, **settings: Any) -> list[str]:
    model, optimizer = wrapped(world, name, Skips(), **settings)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for used in SKIPPING[which]:
            optimizer.zero_grad()
            model(torch.ones(2, 20, dtype=torch.float64), used[world.rank]).pow(2).mean().backward()
            model.finish_gradient_synchronization()
            optimizer.step()
    return [str(each.message) for each in caught if WARNING in str(each.message)]


def every_warning(world: World) -> dict[str, list[str]]:
    calls = {
        f"{name}, {which}, {settings}": warned(world, name, which, **settings)
        for name in CLASSES
        if name != "stage 3"  # its ranks must run the same units
        for which in SKIPPING
        for settings in ({}, {"find_unused_parameters": True})
    }
    calls["stage 3, on all ranks, {}"] = warned(world, "stage 3", "on all ranks")
    return calls


def test_a_layer_that_later_steps_skip_on_all_ranks_is_named_once(on_ranks):
    for rank in zip(*(each.items() for each in on_ranks(2, every_warning)), strict=True):
        case, said = rank[0][0], [texts for _, texts in rank]
        if not case.endswith("on all ranks, {}"):
            assert said == [[], []], case
            continue
        assert all(len(texts) <= 1 for texts in said), case
        assert all(said) or case.startswith("stage"), case  # a sharded mean is known only to the ranks that have it
        together = " ".join(text for texts in said for text in texts)
        assert "layers.2.weight" in together, case
        assert "find_unused_parameters=True" in together, case
        assert "layers.1" not in together, case
