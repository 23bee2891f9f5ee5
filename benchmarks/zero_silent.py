"""A model with another one's parameters, in the same units, whose layers compute nothing: its steps are communication.

A layer hands on what it was given, and gradients of ones, which are not even written anew, to its parameters.
"""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from zero_sides import units_of


class _Silent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gradients: list[Tensor], *parameters: Tensor) -> Tensor:
        """Hand on."""
        ctx.gradients = gradients
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Hand on, with ones for every parameter."""
        return (grad, None, *ctx.gradients)


class Silent(nn.Module):
    """A layer with parameters like some others."""

    def __init__(self, like: "list[nn.Parameter]") -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(each.detach().clone()) for each in like)
        self.ones = [torch.ones_like(each) for each in like]  # no buffers: nobody need send them

    def forward(self, x: Tensor) -> Tensor:
        """Return what was given; every parameter counts as used."""
        result: Tensor = _Silent.apply(x, self.ones, *self.weights)
        return result


def silent(module: nn.Module) -> nn.Sequential:
    """Build it: a block for each unit, between what of the root comes before and after them."""
    units = units_of(module)
    inside = {id(each): number for number, unit in enumerate(units) for each in unit}
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    seen: set[int] = set()
    for name, child in module.named_children():
        if (number := inside.get(id(child))) is not None:
            name, child = f"block{number + 1}", nn.ModuleList(units[number])
        new = [each for each in child.parameters() if id(each) not in seen]
        seen |= {id(each) for each in new}
        if new:
            layers[name] = Silent(new)
    return nn.Sequential(layers)


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    """Yield what the loss takes for a batch: two logits that no weight changes."""
    while True:
        yield torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64)
