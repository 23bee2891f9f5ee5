"""How far a step may be off when its products are rounded otherwise: found by rounding them otherwise.

Where layers are split, products of a forward and a backward are added up in other orders, and what comes after them
computes with what came out. No formula for a sum holds then: how far a rounding reaches depends on every layer behind
it. So the step is done some times more, each time with every product moved by a random part of its own rounding, and
what becomes of loss, logits and gradients is measured (Monte Carlo arithmetic: Parker 1997).

    y = x W'       moved by up to eps |x| |W'|, element by element: what an order may do to a sum, in an element of y
    dx = dy W      moved by up to eps |dy| |W|
    dW = dy' x     moved by up to eps |dy'| |x|

eps is that of the type that is computed in; autocast's products are moved by that of what they are cast to. The bound
is FACTOR times the farthest that an element has moved, and eps of the largest besides, which is rounded itself. What is
left out of a sum, or added twice, moves it by as much as it is: in float32 a million times that.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from muster.pipe.tensor.linear import autocast_to

SAMPLES: Final = 4
FACTOR: Final = 8.0

Values = Mapping[str, Tensor]


class Rounding:
    """Moves the products of a model's linear layers within `moving`."""

    def __init__(self, model: nn.Module, seed: int = 0) -> None:
        self.layers = [each for each in model.modules() if isinstance(each, nn.Linear)]
        device = next(model.parameters()).device
        self.draws = torch.Generator(device).manual_seed(seed)  # its own: dropout goes on with the common one

    def reach(self, compute: Callable[[], Values]) -> dict[str, float]:
        """Return how far each of the values that something computes may be off: their largest elements.

        Compiled pieces run eagerly meanwhile: they would be compiled anew for layers that move.
        """
        with torch.compiler.set_stance("force_eager"):
            return self._reach(compute)

    def _reach(self, compute: Callable[[], Values]) -> dict[str, float]:
        found = compute()
        own = {name: torch.finfo(each.dtype).eps * _largest(each) for name, each in found.items()}
        at_rest = {name: each.double().clone() for name, each in found.items()}
        moved = dict.fromkeys(at_rest, 0.0)
        for _ in range(SAMPLES):
            with self.moving():
                for name, each in compute().items():
                    moved[name] = max(moved[name], _largest(each.double() - at_rest[name]))
        return {name: FACTOR * (own[name] + moved[name]) for name in at_rest}

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Move every product of every forward and backward within."""
        for layer in self.layers:
            layer.forward = partial(self._forward, layer)  # type: ignore[method-assign]
        try:
            yield
        finally:
            for layer in self.layers:
                del layer.forward

    def _forward(self, layer: nn.Linear, x: Tensor) -> Tensor:
        y: Tensor = _Moved.apply(self.moved, *autocast_to(x, layer.weight, layer.bias))  # type: ignore[no-untyped-call]
        return y

    def moved(self, product: Tensor, magnitudes: Tensor) -> Tensor:
        """Move a product by up to eps times the sum of the magnitudes of its terms, evenly either way."""
        draws = torch.rand(product.shape, generator=self.draws, dtype=torch.float32, device=product.device)
        wide = torch.promote_types(product.dtype, torch.float32)
        by = draws.to(wide).mul_(2.0).sub_(1.0) * magnitudes.to(wide) * torch.finfo(product.dtype).eps
        return (product.to(wide) + by).to(product.dtype)


class _Moved(torch.autograd.Function):
    """x (..., inputs), weight (outputs, inputs), bias (outputs,) or None to (..., outputs)."""

    @staticmethod
    def forward(
        ctx: Any, moved: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        ctx.moved = moved
        ctx.save_for_backward(x, weight)
        sizes = (each if each is None else each.abs() for each in (x, weight, bias))
        return moved(functional.linear(x, weight, bias), functional.linear(*sizes))  # type: ignore[arg-type]

    @staticmethod
    def backward(ctx: Any, *of_outputs: Tensor) -> tuple[Any, ...]:
        moved, (x, weight), (of_y,) = ctx.moved, ctx.saved_tensors, of_outputs
        rows, inputs = of_y.flatten(0, -2), x.flatten(0, -2)
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[1:]
        of_x = moved(of_y @ weight, of_y.abs() @ weight.abs()) if wants_x else None
        of_weight = moved(rows.t() @ inputs, rows.abs().t() @ inputs.abs()) if wants_weight else None
        of_bias = moved(rows.sum(0), rows.abs().sum(0)) if wants_bias else None
        return None, of_x, of_weight, of_bias


def _largest(values: Tensor) -> float:
    return float(values.abs().max()) if values.numel() else 0.0
