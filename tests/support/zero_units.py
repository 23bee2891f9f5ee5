"""Modules that are awkward to gather unit by unit."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 6
Run = Callable[["Net", Tensor, int, int], Tensor]  # net, inputs, step, shard within the step


class Net(nn.Module):
    """Parts, and how they are run."""

    def __init__(self, run: Run, **parts: nn.Module) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, inputs: Tensor, step: int, shard: int) -> Tensor:
        return self.run(self, inputs, step, shard)


class Block(nn.Module):
    """A residual block with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 9)
        self.down = nn.Linear(9, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x))) * self.scale


class Sometimes(Block):
    """A block that does without its scale, or without any parameter."""

    def forward(self, x: Tensor, use: int = 0) -> Tensor:
        if use == 2:
            return x * 1.5
        return x + self.down(torch.tanh(self.up(x))) * (self.scale if use == 0 else 1.0)


class Returns(Block):
    """Returns what it has got, too, in a dictionary and a tuple."""

    def forward(self, x: Tensor, unused: Any = None) -> Any:
        out = super().forward(x)
        return {"both": (x, out), "nothing": None, "name": "of a block"}


class Aside(Block):
    """Keeps a part of the loss as an attribute, and another in a list."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.penalty = (out * self.scale).square().mean()
        self.others = [None, self.down(x[..., :1].expand(*x.shape[:-1], 9)).sum()]
        return out


class Adapted(nn.Module):
    """A frozen matrix and a small one beside it that learns, and one that is used as a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
        self.first = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x @ self.first.detach() + self.first.sum())  # needed after its gradient has come
        return self.base(x) + self.up(self.down(x))


class Calls(nn.Module):
    """Calls a unit that is registered elsewhere, in the middle of its own forward."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.others = (other,)  # not a part

    def forward(self, x: Tensor) -> Tensor:
        return self.after(torch.tanh(self.others[0](self.before(x))))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


class Within(Block):
    """Forwards its larger half again in the backward."""

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(lambda y: self.down(torch.tanh(self.up(y))) * self.scale, x, use_reentrant=False)


def chain(net: Net, x: Tensor, step: int, shard: int) -> Tensor:
    for part in net.children():
        x = part(x)
    return x


def blocks(count: int = 4, kind: Callable[[], nn.Module] = Block) -> dict[str, nn.Module]:
    return {f"b{place}": kind() for place in range(count)}


def tied() -> Net:
    net = Net(chain, **blocks(3))
    net.b2.up.weight = net.b0.up.weight  # type: ignore[union-attr,assignment]
    return net


def nested() -> Net:
    inner = Block()
    return Net(lambda net, x, step, shard: net.last(net.outer(net.first(x))), first=Block(), outer=Calls(inner),
               inner=inner, last=Block())  # fmt: skip


def aside(net: Net, x: Tensor, step: int, shard: int) -> Tensor:
    out = chain(net, x, step, shard)
    for part in net.children():
        out = out + part.penalty + part.others[1]
    return out


def in_turns(net: Net, x: Tensor, step: int, shard: int) -> Tensor:
    """Another order in every step, and not all of them."""
    parts = list(net.children())
    for place in ([0, 1, 2, 3], [0, 2, 3], [0, 2, 1, 3], [3, 2, 1, 0])[step % 4]:
        x = parts[place](x)
    return x


def twice(net: Net, x: Tensor, step: int, shard: int) -> Tensor:
    for part in (net.b0, net.b1, net.b0, net.b2, net.b2, net.b2, net.b0):
        x = part(x)
    return x


def some_used(net: Net, x: Tensor, step: int, shard: int) -> Tensor:
    """Other parameters on every rank; the last is used whole by all in the first step."""
    for place, part in enumerate(net.children()):
        x = part(x, (place + shard) % 2 if step or place else 0)
    return x


def none_used(net: Net, x: Tensor, step: int, shard: int) -> Tensor:
    return net.b2(net.b1(net.b0(x), 2 if shard % 2 else 0))


def returned(net: Net, x: Tensor, step: int, shard: int) -> Tensor:
    for part in net.children():
        before, x = part(x, {"a": [None]})["both"]
        x = x + 0.5 * before
    return x


def without(net: Net, x: Tensor, step: int, shard: int) -> Tensor:
    with torch.no_grad():
        target = net.b1(x)
    return net.frozen(net.b2(net.act(net.b1(net.b0(x))))) - target


def branches(net: Net, x: Tensor, step: int, shard: int) -> Tensor:
    left, right = net.b0(x), net.b1(x)
    return net.b3(left) + net.b2(right) * left


def around(net: Net, x: Tensor, step: int, shard: int) -> Tensor:
    for part in net.children():
        x = checkpoint(part, x, use_reentrant=False)
    return x


def over_several(net: Net, x: Tensor, step: int, shard: int) -> Tensor:
    x = checkpoint(lambda y: net.b1(net.b0(y)), x, use_reentrant=False)
    return checkpoint(lambda y: net.b3(net.b2(y)), x, use_reentrant=False)


def reentrant(net: Net, x: Tensor, step: int, shard: int) -> Tensor:
    x = x.requires_grad_()
    for part in net.children():
        x = checkpoint(part, x, use_reentrant=True)
    return x


@dataclass(frozen=True)
class Case:
    """A module, its units (None: its children), and how many of them may be whole at a time beside the root."""

    build: Callable[[], Net]
    units: Callable[[Net], Sequence[Any]] | None = None
    at_most: int = 2
    unused: bool = False


def lists() -> Net:
    return Net(
        lambda net, x, *_: net.last(net.all[0](net.all[1](x))),
        last=nn.Sequential(*blocks(2).values()),
        all=nn.ModuleList(blocks(2).values()),
    )


def adapted() -> Net:
    return Net(chain, **blocks(3, Adapted))


def images() -> Net:
    parts = {
        "c0": nn.Conv2d(3, 4, 3), "n0": nn.BatchNorm2d(4), "a0": nn.ReLU(inplace=True),
        "c1": nn.Conv2d(4, 5, 3), "n1": nn.BatchNorm2d(5), "flat": nn.Flatten(), "head": nn.Linear(20, WIDTH),
    }  # fmt: skip
    return Net(lambda net, x, step, shard: chain(net, x.reshape(2, 3, 6, 6), step, shard), **parts)


CASES = {
    "chain": Case(lambda: Net(chain, **blocks())),
    "a part of each": Case(lambda: Net(chain, **blocks()), lambda net: [net.b0.up, net.b1, (net.b2.up, net.b2.down)]),
    "lists": Case(lists),
    "tuples": Case(images, lambda net: [(net.c0, net.n0), (net.c1, net.n1)]),
    "tied": Case(tied),
    "twice": Case(lambda: Net(twice, **blocks(3))),
    "in turns": Case(lambda: Net(in_turns, **blocks())),
    "some used": Case(lambda: Net(some_used, **blocks(5, Sometimes))),
    "some used, asked": Case(lambda: Net(some_used, **blocks(5, Sometimes)), unused=True),
    "none used": Case(lambda: Net(none_used, b0=Block(), b1=Sometimes(), b2=Block()), unused=True),
    "returned": Case(lambda: Net(returned, **blocks(3, Returns))),
    "without": Case(lambda: Net(without, act=nn.Tanh(), frozen=Block().requires_grad_(False), **blocks(3))),
    "adapted": Case(adapted),
    "aside": Case(lambda: Net(aside, **blocks(3, Aside)), at_most=4),
    "nested": Case(nested, at_most=3),
    "branches": Case(lambda: Net(branches, **blocks())),
    "recurrent": Case(lambda: Net(chain, **blocks(2, Recurrent))),
    "checkpoints within": Case(lambda: Net(chain, **blocks(3, Within))),
    "checkpoints around": Case(lambda: Net(around, **blocks())),
    "checkpoints over several": Case(lambda: Net(over_several, **blocks()), at_most=3),
    "reentrant": Case(lambda: Net(reentrant, **blocks()), at_most=4),
}  # fmt: skip
