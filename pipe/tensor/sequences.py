"""Sequence parallelism (Korthikanti et al. 2022): between split layers, each rank works on some positions only."""

import weakref
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from muster.ddp.compiler import outside
from muster.pipe.tensor.region import Region


def part_of_output(module: nn.Module, region: Region) -> None:
    """Make every rank keep its part of a module's output. The backward gathers the parts' gradients."""
    module.register_forward_hook(partial(_part_of, region))


def _part_of(region: Region, module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return cast(Tensor, outside(_Part.apply, region, output))


class SumGradients:
    """A hook that sums the gradients of a module's parameters over the ranks, if the module works on a part of a
    sequence.

    The sum happens before accumulation, so that hooks on accumulated gradients see the sum. Every forward looks for
    parameters without a hook, such as those of a copied module or newly assigned ones.
    """

    def __init__(self, module: nn.Module, region: Region) -> None:
        self.region = region
        self.known: dict[int, weakref.ref[nn.Parameter]] = {}
        module.register_forward_pre_hook(self)

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Register hooks on parameters that have no such hook yet."""
        outside(self.watch, module)

    def watch(self, module: nn.Module) -> None:
        """Register hooks on parameters."""
        for parameter in module.parameters():
            known = self.known.get(id(parameter))
            if parameter.requires_grad and (known is None or known() is not parameter):
                self.known[id(parameter)] = weakref.ref(parameter)
                parameter.register_hook(self.sum)  # type: ignore[no-untyped-call]

    def sum(self, gradient: Tensor) -> Tensor:
        """Sum a gradient over the ranks."""
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
