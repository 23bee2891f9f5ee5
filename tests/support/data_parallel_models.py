"""Modules that data parallel must get right, each with a loss that depends on nothing but the number of a shard."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from muster.jobs.models.shapes import POOL, GptShape, VggShape
from muster.jobs.train.models.gpt import build_gpt
from muster.jobs.train.models.vgg import build_vgg
from support.zero_models import Several, seeded


@dataclass(frozen=True)
class Case:
    """A module as a function of a seed, and the loss of a shard."""

    build: Callable[[int], nn.Module]
    loss: Callable[[nn.Module, int], Tensor]
    unused: bool = False  # True: no shard uses all of its parameters


def generator_of(shard: int) -> torch.Generator:
    return torch.Generator().manual_seed(100 + shard)


def normal(module: nn.Module, shard: int, *shape: int) -> Tensor:
    """Draw inputs on the CPU, so that a shard has the same on every device, and put them where the module is."""
    return torch.randn(*shape, generator=generator_of(shard)).to(device_of(module))


def device_of(module: nn.Module) -> torch.device:
    return next(module.parameters()).device


class ToyModel(nn.Module):
    """Two linear layers without bias and a norm between them."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(10, 20, bias=False)
        self.norm = nn.LayerNorm(20)
        self.fc2 = nn.Linear(20, 5, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.fc2(torch.relu(self.norm(self.fc1(inputs))))


class Tied(nn.Module):
    """One matrix at both ends, used twice in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.middle = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.middle(self.embed(tokens))))


class Odd(nn.Module):
    """Frozen, permuted and sometimes unused parameters, sizes that nothing divides, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(7, 15))
        self.frozen = nn.Parameter(torch.randn(15), requires_grad=False)
        self.sometimes = nn.Parameter(torch.randn(15))
        self.permuted = nn.Parameter(torch.randn(5, 15).t())
        self.register_buffer("scale", torch.rand(()) + 1)

    def forward(self, inputs: Tensor, use_all: bool = True) -> Tensor:
        hidden = torch.tanh(inputs @ self.first + self.frozen) * self.scale
        if use_all:
            hidden = hidden * self.sometimes
        return (hidden @ self.permuted).square().mean() + (inputs @ self.first).sum()  # `first` is used twice


class Tiny(nn.Module):
    """Parameters with fewer elements than there are ranks: a number, one of one element, one of none, one of two."""

    def __init__(self) -> None:
        super().__init__()
        self.number = nn.Parameter(torch.randn(()))
        self.one = nn.Parameter(torch.randn(1))
        self.none = nn.Parameter(torch.randn(0, 3))
        self.two = nn.Parameter(torch.randn(2))

    def forward(self, inputs: Tensor) -> Tensor:
        return ((inputs * self.number + self.one) * self.two).square().sum() + self.none.sum()


def mixed(other: torch.dtype) -> nn.Module:
    """Two dtypes in turns, so that neighbours cannot share a bucket."""
    return Several((torch.float32, other) * 2, width=6)


class TwoWays(nn.Module):
    """Two branches of different sizes, computed in an order that the caller chooses: so become gradients ready."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(4, 9)
        self.right = nn.Linear(4, 3)

    def forward(self, inputs: Tensor, turned: bool) -> Tensor:
        branches = [self.right, self.left] if turned else [self.left, self.right]
        total = inputs.new_zeros(())
        for branch in branches:
            total = total + branch(inputs).square().sum()
        return total


class Chain(nn.Module):
    """Four matrices of 16 KiB: gradients become ready last to first, one at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(4))

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.layers:
            inputs = torch.tanh(layer(inputs))
        return inputs


class Recomputed(nn.Module):
    """Two layers whose activations are computed again in the backward: reentrant ones in a backward within it."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.reentrant = reentrant

    def forward(self, inputs: Tensor) -> Tensor:
        inputs = inputs.requires_grad_()  # a reentrant checkpoint has gradients only then
        hidden = torch.tanh(checkpoint(self.first, inputs, use_reentrant=self.reentrant))
        return checkpoint(self.second, hidden, use_reentrant=self.reentrant)


def narrow_vgg11(seed: int) -> nn.Module:
    """Build VGG-11 with an eighth of its channels: the same layers, batch norms and pools."""
    return build_vgg(VggShape("vgg11", (8, POOL, 16, POOL, 32, 32, POOL, 64, 64, POOL, 64, 64, POOL)), seed)


def small_gpt(seed: int) -> nn.Module:
    """Build a GPT of two blocks whose head is its embedding."""
    return build_gpt(GptShape("gpt", d_model=16, d_ff=32, layers=2, heads=2, context=8, vocabulary=32), seed)


def squares(module: nn.Module, shard: int, width: int = 10) -> Tensor:
    return module(normal(module, shard, 3, width)).square().sum()


def next_tokens(module: nn.Module, shard: int, vocabulary: int, length: int) -> Tensor:
    tokens = torch.randint(vocabulary, (2, length + 1), generator=generator_of(shard)).to(device_of(module))
    logits = module(tokens[:, :-1])  # (batch, tokens, vocabulary)
    return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def classes(module: nn.Module, shard: int) -> Tensor:
    wanted = torch.randint(10, (4,), generator=generator_of(shard + 1000)).to(device_of(module))
    return functional.cross_entropy(module(normal(module, shard, 4, 3, 32, 32)), wanted)


CASES = {
    "toy": Case(partial(seeded, ToyModel), squares),
    "tied": Case(partial(seeded, Tied), partial(next_tokens, vocabulary=11, length=5)),
    "odd": Case(partial(seeded, Odd), lambda module, shard: module(normal(module, shard, 3, 7))),
    "unused in odd shards": Case(
        partial(seeded, Odd), lambda module, shard: module(normal(module, shard, 3, 7), use_all=shard % 2 == 0)
    ),
    "unused in even shards": Case(
        partial(seeded, Odd), lambda module, shard: module(normal(module, shard, 3, 7), use_all=shard % 2 == 1)
    ),
    "never used": Case(
        partial(seeded, Odd), lambda module, shard: module(normal(module, shard, 3, 7), use_all=False), unused=True
    ),
    "tiny": Case(partial(seeded, Tiny), lambda module, shard: module(normal(module, shard, 2))),
    "double": Case(partial(seeded, partial(mixed, torch.float64)), partial(squares, width=6)),
    "bfloat16": Case(partial(seeded, partial(mixed, torch.bfloat16)), partial(squares, width=6)),
    "two ways": Case(
        partial(seeded, TwoWays), lambda module, shard: module(normal(module, shard, 3, 4), turned=shard % 2 == 1)
    ),
    "recomputed": Case(partial(seeded, partial(Recomputed, False)), partial(squares, width=6)),
    "recomputed in turns": Case(partial(seeded, partial(Recomputed, True)), partial(squares, width=6)),
    "chain": Case(partial(seeded, Chain), partial(squares, width=64)),
    "vgg11": Case(narrow_vgg11, classes),
    "gpt": Case(small_gpt, partial(next_tokens, vocabulary=32, length=8)),
}
