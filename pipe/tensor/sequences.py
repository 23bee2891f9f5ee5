"""Where sequences are split (Korthikanti et al. 2022): what lies between split layers has a part of the positions."""

import weakref
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from muster.pipe.tensor.region import Region, outside_graph


def part_of_output(module: nn.Module, region: Region) -> None:
    """Let every rank keep its part of what a module makes; in the backward the ranks' parts come together again."""
    module.register_forward_hook(partial(_part_of, region))


def _part_of(region: Region, module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return cast(Tensor, outside_graph(_Part.apply, region, output))


class SumGradients:
    """A hook of a module that works on a part: the ranks' gradients of its parameters are added up.

    Before they are accumulated, so that whoever waits for a gradient waits for the sum. Parameters are looked at in
    every forward: those of a copy of the module, or set anew, have no hook yet.
    """

    def __init__(self, module: nn.Module, region: Region) -> None:
        self.region = region
        self.known: dict[int, weakref.ref[nn.Parameter]] = {}
        module.register_forward_pre_hook(self)

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Watch parameters that are not watched yet."""
        outside_graph(self.watch, module)

    def watch(self, module: nn.Module) -> None:
        """Put hooks on parameters."""
        for parameter in module.parameters():
            known = self.known.get(id(parameter))
            if parameter.requires_grad and (known is None or known() is not parameter):
                self.known[id(parameter)] = weakref.ref(parameter)
                parameter.register_hook(self.sum)  # type: ignore[no-untyped-call]

    def sum(self, gradient: Tensor) -> Tensor:
        """Add up the ranks' gradients."""
        return self.region.begin_sum(gradient.clone(memory_format=torch.contiguous_format))()


class _Part(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, region: Region, x: Tensor) -> Tensor:
        ctx.region = region
        return region.part(x)

    @staticmethod
    def backward(ctx: Any, *of_outputs: Tensor) -> tuple[Tensor | None, ...]:
        ctx.region.require_first_order()
        return None, ctx.region.begin_gather(of_outputs[0])()
