"""Split models with one mistake each, for tests of the tests."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from muster.pipe.tensor import cross_entropy, linear, plan, sequences, split, vocabulary
from muster.pipe.tensor.region import Pending, Region


class Silent(Region):
    """A region in which nobody says anything: shapes are right, numbers are this rank's alone."""

    def __init__(self, region: Region) -> None:
        self.__dict__.update(region.__dict__)

    def _begin(self, x: Tensor, operation: Any) -> Pending:
        return lambda: x

    def begin_gather(self, x: Tensor) -> Pending:
        return lambda: torch.cat([x] * self.ranks, self.sequence_dimension or 0)

    def begin_scatter_sum(self, x: Tensor) -> Pending:
        return lambda: self.part(x)


def silent_forward(function: type[torch.autograd.Function]) -> Any:
    made = function.forward

    def forward(ctx: Any, region: Region, *rest: Any) -> Any:
        found = made(ctx, Silent(region), *rest)
        ctx.region = region
        return found

    return mock.patch.object(function, "forward", staticmethod(forward))


def silent_backward(function: type[torch.autograd.Function]) -> Any:
    made = function.backward

    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.region = Silent(ctx.region)
        return made(ctx, *gradients)

    return mock.patch.object(function, "backward", staticmethod(backward))


def no_maximum() -> Any:
    return mock.patch.object(Region, "begin_maximum", lambda region, x: lambda: x)


def bias_on_every_rank() -> Any:
    made = linear._Row.forward

    def forward(ctx: Any, region: Region, later: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = made(ctx, region, later, x, weight, bias)
        return y if bias is None or region.rank == 0 or region.splits_sequence else y + bias

    return mock.patch.object(linear._Row, "forward", staticmethod(forward))


def tied_weight_torn() -> Any:
    cut = split._cut

    def torn(module: nn.Module, *rest: Any) -> None:
        cut(module, *rest)
        module.head.weight = nn.Parameter(module.head.weight.detach().clone())

    return mock.patch.object(split, "_cut", torn)


def other_heads() -> Any:
    """Every rank takes the first rows."""
    share = Region.share
    return mock.patch.object(Region, "share", lambda region, size: share(Region(None), size // region.ranks))


# a mistake, and the dimensions of the sequence where it is one
MUTANTS: dict[str, tuple[Callable[[], Any], tuple[int | None, ...]]] = {
    "no mistake": (nullcontext, ()),
    "column: input not gathered": (lambda: silent_forward(linear._Columns), (1,)),
    "column: gradient of the input not summed": (lambda: silent_backward(linear._Columns), (None, 1)),
    "row: output not summed": (lambda: silent_forward(linear._Row), (None, 1)),
    "row: gradient of the output not gathered": (lambda: silent_backward(linear._Row), (1,)),
    "row: bias on every rank": (bias_on_every_rank, (None,)),
    "embedding not summed": (lambda: silent_forward(vocabulary._Sum), (None, 1)),
    "embedding: gradient not gathered": (lambda: silent_backward(sequences._Part), (1,)),
    "norms: gradients not summed": (lambda: mock.patch.object(plan, "SumGradients"), (1,)),
    "loss: sums of others left out": (lambda: silent_forward(cross_entropy._SplitLoss), (None, 1)),
    "loss: each its own maximum": (no_maximum, (None, 1)),
    "tied weight torn": (tied_weight_torn, (None, 1)),
    "every rank the first rows": (other_heads, (None, 1)),
}
