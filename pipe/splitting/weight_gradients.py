"""Compute the gradients of layers' weights from their inputs x and output gradients dY, later than the backward.

    linear       y = x W' + b        dW += dY' x (one matrix product that accumulates)  db += sum of dY over rows
    convolution  y = x * W + b       dW, db: torch's own backward of a convolution, restricted to these two

`Sums` adds them to `.grad` as autograd would: it sums the contributions of all uses in one micro-batch to one gradient,
and then calls the hooks. With `exact` the bits are autograd's, too: the uses are added up before they are added to
`.grad`, and no product accumulates into `.grad` directly, because that would skip one rounding.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import torch
from torch import Tensor, nn

# Types in which torch accumulates directly. It sums 16-bit types in float32.
FULL: Final = (torch.float32, torch.float64)


class PendingGradients(NamedTuple):
    """The pending weight gradients of one call of a layer."""

    kind: "GradientKind"
    weight: nn.Parameter
    bias: nn.Parameter | None  # None if the layer has no bias, or if the bias is frozen
    x: Tensor
    gradient: Tensor  # gradient of the output; both tensors have the type of the computation


class PendingQueue(Protocol):
    """A queue of pending work, such as `pipe.splitting.halves.WeightQueue`."""

    def keep(self, work: PendingGradients) -> None:
        """Add the pending gradients of one call of a layer, during its backward."""


class Sums:
    """The sums of one micro-batch's gradients, which are added to `.grad`."""

    def __init__(self, works: Sequence[PendingGradients], *, exact: bool) -> None:
        self.exact = exact
        learning = [each for work in works for each in work[1:3] if each is not None]
        self._uses = Counter(map(id, learning))  # number of uses that have not been added yet, by parameter
        self._partial: dict[int, Tensor] = {}  # sums over the uses so far, if only complete ones may be added
        self._ones: Tensor | None = None
        self._simple = len(self._uses) == len(learning) and not any(  # True if each parameter has one use and no hooks
            each._post_accumulate_grad_hooks or each._backward_hooks for each in learning
        )

    def fused(self, parameter: nn.Parameter, gradient: Tensor) -> Tensor | None:
        """Return `.grad` if a product may accumulate into it directly; else None."""
        held = parameter.grad
        if self.exact or held is None or held.dtype is not gradient.dtype:
            return None
        return held if self._simple or not parameter._backward_hooks else None

    def ones(self, rows: Tensor) -> Tensor:
        """Return a vector of ones, one for each row of a matrix."""
        ones = self._ones
        if ones is None or ones.size(0) != rows.size(0) or ones.dtype is not rows.dtype or ones.device != rows.device:
            ones = self._ones = rows.new_ones(rows.size(0))
        return ones

    def add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Add a parameter's gradient from one use."""
        if not self._simple and (self.exact or parameter._backward_hooks):
            place = id(parameter)
            if (partial := self._partial.pop(place, None)) is not None:
                gradient = partial.add_(gradient)
            if self._uses[place] > 1:
                self._partial[place] = gradient
                self._uses[place] -= 1
                return
            gradient = _hooked(parameter, gradient)
        if (held := parameter.grad) is None:
            parameter.grad = _laid_out(parameter, gradient)
        else:
            held.add_(gradient)
        self.added(parameter)

    def added(self, parameter: nn.Parameter) -> None:
        """Note that one use has been added; after the last use, call the parameter's hooks."""
        if self._simple:
            return
        place = id(parameter)
        self._uses[place] -= 1
        if self._uses[place]:
            return
        if hooks := parameter._post_accumulate_grad_hooks:
            for hook in tuple(hooks.values()):
                hook(parameter)


class GradientKind(ABC):
    """The computation of gradients for one kind of layer."""

    @abstractmethod
    def run(self, work: PendingGradients, sums: Sums) -> None:
        """Compute the weight gradients of one call, and add them."""

    @abstractmethod
    def of_input(self, gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """Return the gradient of x, in the shape of x."""


class Linear(GradientKind):
    """Gradients of linear layers, from x (..., features) and dY (..., outputs)."""

    def run(self, work: PendingGradients, sums: Sums) -> None:
        _, weight, bias, x, gradient = work
        if x.dim() > 2:
            x = x.flatten(0, -2)  # (rows, features)
        if gradient.dim() > 2:
            gradient = gradient.flatten(0, -2)  # (rows, outputs)
        turned = gradient.t()  # (outputs, rows)
        if (held := sums.fused(weight, gradient)) is not None:
            held.addmm_(turned, x)
            sums.added(weight)
        else:
            sums.add(weight, turned.mm(x))
        if bias is None:
            return
        if (held := sums.fused(bias, gradient)) is not None and gradient.dtype in FULL:
            held.addmv_(turned, sums.ones(gradient))  # four times as fast as sum(), then add_()
            sums.added(bias)
        else:
            sums.add(bias, gradient.sum(0))

    def of_input(self, gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return gradient.flatten(0, -2).mm(weight.to(gradient.dtype)).view(x.shape)


@dataclass(frozen=True)
class Convolution(GradientKind):
    """Gradients of convolutions, from x (batch, channels, ...) and dY (batch, outputs, ...).

    Each convolution setting has one number per dimension.
    """

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def run(self, work: PendingGradients, sums: Sums) -> None:
        wanted = [False, True, work.bias is not None]
        _, of_weight, of_bias = self._backward(work.gradient, work.x, work.weight, wanted)
        sums.add(work.weight, of_weight)
        if work.bias is not None:
            sums.add(work.bias, of_bias)

    def of_input(self, gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return self._backward(gradient, x, weight, [True, False, False])[0]

    def _backward(self, gradient: Tensor, x: Tensor, weight: Tensor, wanted: list[bool]) -> tuple[Tensor, ...]:
        made: tuple[Tensor, ...] = torch.ops.aten.convolution_backward(
            gradient,
            x,
            weight.to(gradient.dtype),  # the values are not used for weight gradients, only shape and memory format
            [gradient.shape[1]],
            self.stride,
            self.padding,
            self.dilation,
            False,  # not transposed
            [0] * len(self.stride),
            self.groups,
            wanted,
        )
        return made


LINEAR: Final = Linear()


def _hooked(parameter: nn.Parameter, gradient: Tensor) -> Tensor:
    """Call a parameter's own hooks, which may change the gradient, before it is added."""
    for hook in tuple((parameter._backward_hooks or {}).values()):
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    return gradient


def _laid_out(parameter: nn.Parameter, gradient: Tensor) -> Tensor:
    """Convert a first gradient to its parameter's type and strides."""
    if gradient.dtype == parameter.dtype and gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter).copy_(gradient)
