"""Measure how far rounding can move the results of a step, by adding random rounding noise (Monte Carlo arithmetic).

If layers are split, the sums within matrix products of the forward and backward are taken in another order, and
everything after them computes with the results. No formula bounds the effect, because it depends on all later layers.
So the step is repeated a few times, with random noise of the size of the rounding error added to every product, and the
largest deviations of loss, logits and gradients are measured (Parker 1997).

    y = x W'       noise of up to eps |x| |W'|, element by element: the most that an order of summation can change
    dx = dy W      noise of up to eps |dy| |W|
    dW = dy' x     noise of up to eps |dy'| |x|

eps belongs to the dtype of the computation, which under autocast is the dtype cast to. The bound is FACTOR times the
sum of the largest deviation of an element and, for its own rounding, eps times the largest element. A term that is
missing from a sum, or added twice, changes it by the term's full size, in float32 about a million times as much as
rounding does.
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
    """Rounding noise for the products of a model's linear layers, added within `moving`."""

    def __init__(self, model: nn.Module, seed: int = 0) -> None:
        self.layers = [each for each in model.modules() if isinstance(each, nn.Linear)]
        device = next(model.parameters()).device
        # a separate generator, so that dropout's random numbers stay the same
        self.draws = torch.Generator(device).manual_seed(seed)

    def reach(self, compute: Callable[[], Values]) -> dict[str, float]:
        """Return the bound on the deviation of each value that `compute` returns.

        Compiled code runs eagerly here, because it would be recompiled for the changed layers.
        """
        with torch.compiler.set_stance("force_eager"):
            return self._reach(compute)

    def _reach(self, compute: Callable[[], Values]) -> dict[str, float]:
        found = {name: each for name, each in compute().items() if each.is_floating_point()}
        own = {name: torch.finfo(each.dtype).eps * _largest(each) for name, each in found.items()}
        at_rest = {name: each.double().clone() for name, each in found.items()}
        moved = dict.fromkeys(at_rest, 0.0)
        for _ in range(SAMPLES):
            with self.moving():
                again = compute()
                moved = {name: max(far, _largest(again[name].double() - at_rest[name])) for name, far in moved.items()}
        return {name: FACTOR * (own[name] + moved[name]) for name in at_rest}

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Add noise to every product of every forward and backward within the block."""
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
        """Add uniform noise to a product, of up to eps times the sum of the magnitudes of its terms."""
        draws = torch.rand(product.shape, generator=self.draws, dtype=torch.float32, device=product.device)
        wide = torch.promote_types(product.dtype, torch.float32)
        by = draws.to(wide).mul_(2.0).sub_(1.0) * magnitudes.to(wide) * torch.finfo(product.dtype).eps
        return (product.to(wide) + by).to(product.dtype)


class _Moved(torch.autograd.Function):
    """A noisy linear layer: maps x (..., inputs) to (..., outputs), with weight (outputs, inputs) and optional bias."""

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
