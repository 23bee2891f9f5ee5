"""Parameters without a gradient: a custom function returned None for them, or a later step skipped their layer."""

import warnings
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
ADAMW: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.5}


class Affine(torch.autograd.Function):
    """A linear layer that returns None as the gradients of the parameters in `without`."""

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


class Layer(nn.Linear):
    def forward(self, x: Tensor, without: str) -> Tensor:
        return Affine.apply(x, self.weight, self.bias, without)


class Net(nn.Module):
    """Four layers. The forward skips the layers in `without`, such as "1"; "1.bias" gets None as its gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(20, 20).double() for _ in range(4))

    def forward(self, number: int, without: str) -> Tensor:
        x = torch.randn(3, 20, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
        for place, layer in enumerate(self.layers):
            if str(place) not in without.split():
                x = layer(x, " ".join(each for each in without.split() if each.startswith(f"{place}.")))
        return x.pow(2).mean()


def wrapped(world: World, name: str, module: nn.Module, **settings: Any) -> tuple[Any, torch.optim.Optimizer]:
    """Return the wrapper and its optimizer."""
    if name in WRAPPERS:
        return getattr(ddp, name)(module, world.group, **settings), torch.optim.AdamW(module.parameters(), **ADAMW)
    model = ShardedDataParallel(
        module, world.group, stage=int(name[-1]), units=list(module.layers), bucket_size_mb=0.002, **settings
    )
    return model, model.optimizer(torch.optim.AdamW, **ADAMW)


def synchronized(model: Any, number: int, without: str) -> None:
    model(number, without).backward()
    model.finish_gradient_synchronization()


NONE = [  # for each step and rank, what is without a gradient; first on all ranks, last everything on one rank
    ("1.bias 3.weight", "1.bias"),
    ("", "0.weight 0.bias 2.bias"),
    ("0.weight 1.weight 2.weight 3.weight 0.bias 1.bias 2.bias 3.bias", "2.bias"),
]


def nones(world: World) -> list[str]:
    """Train with gradients of None; name what differs from one process."""
    problems = []
    for name, exact in ((name, exact) for name in CLASSES for exact in (False, True)):
        module, twin = Net(), Net()
        model, optimizer = wrapped(world, name, module, find_unused_parameters=True, exact=exact)
        reference = torch.optim.AdamW(twin.parameters(), **ADAMW)
        for step, without in enumerate(NONE):
            for each in (optimizer, reference):
                each.zero_grad()
            synchronized(model, step * world.size + world.rank, without[world.rank])
            for rank in range(world.size):
                (twin(step * world.size + rank, without[rank]) / world.size).backward()
            for each in (optimizer, reference):
                each.step()
        found, wanted = model.state_dict(), twin.state_dict()
        problems += [f"{name}, {exact}: {key}" for key in wanted if not torch.allclose(found[key], wanted[key])]
    return problems


def test_gradients_of_none_train_as_in_one_process(on_ranks):
    assert on_ranks(2, nones) == [[]] * 2


def refused(world: World) -> list[str]:
    models = [wrapped(world, name, Net())[0] for name in CLASSES]
    return [said_by(lambda: synchronized(model, 0, "1.bias"), RuntimeError) for model in models]  # noqa: B023


def test_without_the_option_a_gradient_of_none_on_all_ranks_is_refused_by_name(on_ranks):
    wanted = "1 of 8 parameters got no gradient on any rank: layers.1.bias; if the loss does"
    assert [[text[: len(wanted)] for text in said] for said in on_ranks(2, refused)] == [[wanted] * len(CLASSES)] * 2


SKIPPED = {
    "all": [("", ""), ("2", "2"), ("1 3", "1 3")],
    "one": [("", ""), ("", "2"), ("3", "")],
    "none": [("", "")] * 3,
}


def warned(world: World, name: str, which: str, **settings: Any) -> list[str]:
    model, optimizer = wrapped(world, name, Net(), **settings)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number, without in enumerate(SKIPPED[which]):
            optimizer.zero_grad()
            synchronized(model, number, without[world.rank])
            optimizer.step()
    return [str(each.message) for each in caught if "got no gradient in this step" in str(each.message)]


def warnings_of(world: World) -> dict[str, list[str]]:
    cases = [(name, which) for name in CLASSES for which in SKIPPED if (name, which) != ("stage 3", "one")]
    quiet = {
        f"{name}, {which}, allowed": warned(world, name, which, find_unused_parameters=True) for name, which in cases
    }
    return quiet | {f"{name}, {which}": warned(world, name, which) for name, which in cases}


def test_a_layer_that_later_steps_skip_on_all_ranks_is_named_once(on_ranks):
    first, second = on_ranks(2, warnings_of)
    for case, said in ((case, [first[case], second[case]]) for case in first):
        texts = [text for each in said for text in each]
        is_told = {"layers.2.weight" in text and "set find_unused_parameters=True" in text for text in texts}
        assert is_told == ({True} if case.endswith(", all") else set()), case
        # A sharded mean is known only to the ranks that have a part of it.
        assert not texts or len(texts) == 1 + (first[case] != [] and second[case] != []), case
        assert not texts or case.startswith("stage") or len(texts) == 2, case
