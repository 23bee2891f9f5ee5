"""Split layers inside `torch.compile`: a custom operation that compiled code calls but cannot inspect.

    backward   dX = input_gradient(dY, x, W, place)      the gradient of the input; as a hidden side effect,
                                                         (x, dY) are kept for `WeightQueue.run`

The operation returns dX itself, so the compiler cannot remove it. It keeps copies of x and dY, because compiled code
reuses the memory of a tensor once its own graph no longer needs it. `place` is the layer's number, as a tensor: layers
of equal shape share compiled code, which would treat an integer as a constant. If the input needs no gradient, autograd
does not call the operation, so such a layer is not split.
"""

import weakref
from typing import Any, Final, Protocol

import torch
from torch import Tensor
from torch.nn import functional

RUNS: Final = (functional.linear, functional.conv1d, functional.conv2d, functional.conv3d)  # index: weight.dim() - 2


class SplitLayer(Protocol):
    """A split layer, as seen by compiled code."""

    def keep_copies(self, x: Tensor, gradient: Tensor) -> None:
        """Keep copies of a call's input and of its output's gradient."""
        ...

    def of_input(self, gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """Return the gradient of the input."""
        ...


_LAYERS: Final[weakref.WeakValueDictionary[int, SplitLayer]] = weakref.WeakValueDictionary()
"""Layers by number. Compiled code passes the number as a tensor, because it cannot pass the layer itself."""


def number(place: SplitLayer) -> Tensor:
    """Return a new number for a layer, as a tensor. The number is freed with the layer."""
    given = max(_LAYERS, default=-1) + 1
    _LAYERS[given] = place
    return torch.tensor(given)


def _input_gradient(gradient: Tensor, x: Tensor, weight: Tensor, place: Tensor) -> Tensor:
    layer = _LAYERS.get(int(place))
    if layer is None:
        raise RuntimeError("compiled code ran the backward of a layer that is no longer split; run its forward again")
    layer.keep_copies(x, gradient)
    made = layer.of_input(gradient, x, weight)
    return made if made.stride() == x.stride() else torch.empty_like(x).copy_(made)


def _like_input(gradient: Tensor, x: Tensor, weight: Tensor, place: Tensor) -> Tensor:
    return torch.empty_like(x)


input_gradient: Final = torch.library.custom_op("muster_pipe::input_gradient", _input_gradient, mutates_args=())
input_gradient.register_fake(_like_input)


class _Layer(torch.autograd.Function):
    """A linear layer or convolution whose backward calls the custom operation."""

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
    """Run a layer in compiled code. A convolution's `settings` are stride, padding, dilation and groups."""
    y: Tensor = _Layer.apply(  # type: ignore[no-untyped-call]
        x, weight.detach(), None if bias is None else bias.detach(), place, *settings
    )
    return y
