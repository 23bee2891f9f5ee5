"""Split layers within what `torch.compile` makes: one operation of ours, which compiled code calls but cannot read.

    backward   dX = input_gradient(dY, x, W, place)      the gradient of the input, and, behind the compiler's back,
                                                         (x, dY) kept for `WeightQueue.run`

The operation makes dX itself, so that it cannot be left out. What it keeps it copies: compiled code uses the memory of
a tensor again as soon as nobody in its graph needs it. `place` is the number of a layer, as a tensor, because equal
layers share compiled code, for which a number would be a constant. An input that needs no gradient leaves nothing to
hang the operation on: such a layer stays whole.
"""

import weakref
from typing import Any, Final, Protocol

import torch
from torch import Tensor
from torch.nn import functional

RUNS: Final = (functional.linear, functional.conv1d, functional.conv2d, functional.conv3d)  # by dimensions of weights


class Place(Protocol):
    """A split layer, as compiled code meets it."""

    def keep_copies(self, x: Tensor, gradient: Tensor) -> None:
        """Keep copies of a use's input and of its output's gradient."""
        ...

    def of_input(self, gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """Return the gradient of an input."""
        ...


_PLACES: Final[weakref.WeakValueDictionary[int, Place]] = weakref.WeakValueDictionary()
"""The layers that compiled code may name: an operation's arguments are tensors, so they are found by number."""


def number(place: Place) -> Tensor:
    """Give a layer a number, as a tensor; it is forgotten with the layer."""
    given = max(_PLACES, default=-1) + 1
    _PLACES[given] = place
    return torch.tensor(given)


def _input_gradient(gradient: Tensor, x: Tensor, weight: Tensor, place: Tensor) -> Tensor:
    layer = _PLACES.get(int(place))
    if layer is None:
        raise RuntimeError("compiled code has the backward of a layer that is no longer split; forward it again")
    layer.keep_copies(x, gradient)
    made = layer.of_input(gradient, x, weight)
    return made if made.stride() == x.stride() else torch.empty_like(x).copy_(made)


def _like_input(gradient: Tensor, x: Tensor, weight: Tensor, place: Tensor) -> Tensor:
    return torch.empty_like(x)


input_gradient: Final = torch.library.custom_op("muster_pipe::input_gradient", _input_gradient, mutates_args=())
input_gradient.register_fake(_like_input)


class _Layer(torch.autograd.Function):
    """A linear layer or a convolution whose backward is ours."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, place: Tensor, *settings: Any) -> Tensor:
        ctx.save_for_backward(x, weight, place)
        ctx.settings = len(settings)
        return RUNS[weight.dim() - 2](x, weight, bias, *settings)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        made: Tensor = torch.ops.muster_pipe.input_gradient(gradient, *ctx.saved_tensors)
        return made, *[None] * (3 + ctx.settings)


def layer(x: Tensor, weight: Tensor, bias: Tensor | None, place: Tensor, *settings: Any) -> Tensor:
    """Do a layer in a graph that is compiled; a convolution's settings are stride, padding, dilation and groups."""
    y: Tensor = _Layer.apply(  # type: ignore[no-untyped-call]
        x, weight.detach(), None if bias is None else bias.detach(), place, *settings
    )
    return y
