"""Compute a GPT's head and cross-entropy together, in chunks, so that only one chunk of bfloat16 logits exists.

With a vocabulary of 50,304 the logits of 32 x 1,024 tokens take 3.3 GB in 16 bits and 6.6 GB in 32, several times per
step. Here the forward computes the gradients, too: of each chunk's logits, and from them those of input and weight. The
backward only scales these. Logarithms, sums and differences are float32.

The stored gradients are those of the sum of the losses, not the mean. They may exceed the range of float16, where no
loss scale could help, so only bfloat16 uses this loss.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from muster.jobs.train.numerics.pieces import compiled

CHUNK_BYTES: Final = 2**28  # size of a chunk of logits
COMPILED_CHUNK_BYTES: Final = 2**32  # compiled code reads and writes logits once, so one large chunk is best

Kernel = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def chunked_loss(
    head: nn.Module, x: Tensor, targets: Tensor, *, compile: bool = False, chunk_bytes: int | None = None
) -> Tensor:
    """Return the mean cross-entropy of a linear head's logits of x (..., d_model) against targets (...)."""
    assert isinstance(head, nn.Linear)
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    most = chunk_bytes or (COMPILED_CHUNK_BYTES if compile else CHUNK_BYTES)
    rows = max(1, most // (head.out_features * dtype.itemsize))
    kernel = compiled_kernel() if compile else row_gradients
    low = (x.flatten(0, -2).to(dtype), head.weight.to(dtype), None if head.bias is None else head.bias.to(dtype))
    loss_sum: Tensor = _LinearLoss.apply(*low, targets.flatten(), rows, kernel, torch.is_grad_enabled())  # type: ignore[no-untyped-call]
    return loss_sum / targets.numel()


class _LinearLoss(torch.autograd.Function):
    """The summed loss for x (rows, d_model), weight (classes, d_model), bias (classes,) or None, targets (rows,)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        rows: int,
        kernel: Kernel,
        backward_follows: bool,
    ) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=x.device)
        of_input = torch.empty_like(x)
        of_weight: Tensor | None = None
        of_bias: Tensor | None = None
        for start in range(0, len(x), rows):
            chunk = x[start : start + rows]
            loss_sum, gradient = kernel(functional.linear(chunk, weight, bias), targets[start : start + rows])
            total += loss_sum
            if not backward_follows:
                continue
            torch.mm(gradient, weight, out=of_input[start : start + rows])
            of_weight = _added(of_weight, gradient.t() @ chunk, last=start + rows >= len(x))
            if bias is not None:
                of_bias = _added(of_bias, gradient.sum(0), last=start + rows >= len(x))
        ctx.save_for_backward(of_input, of_weight, of_bias)
        return total

    @staticmethod
    def backward(ctx: Any, *of_loss: Any) -> tuple[Tensor | None, ...]:
        gradients = [None if each is None else each * of_loss[0].to(each.dtype) for each in ctx.saved_tensors]
        return (*gradients, None, None, None, None)


def _added(total: Tensor | None, more: Tensor, *, last: bool) -> Tensor:
    """Add in float32, and round once at the end."""
    if total is None:
        return more if last else more.float()
    total += more
    return total.to(more.dtype) if last else total


def row_gradients(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of losses of logits (rows, classes), and its gradient: softmax, minus 1 at the target."""
    log_p = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    wanted = targets[:, None]
    loss_sum = -log_p.gather(-1, wanted).sum()
    gradient = log_p.exp_().scatter_add_(-1, wanted, log_p.new_full((), -1.0).expand_as(wanted))
    return loss_sum, gradient.to(logits.dtype)


def row_gradients_by_comparing(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `row_gradients` without a scatter, so that it compiles to one kernel."""
    log_p = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    wanted = torch.arange(logits.shape[-1], device=logits.device) == targets[:, None]  # (rows, classes)
    loss_sum = -torch.where(wanted, log_p, 0.0).sum()
    return loss_sum, (log_p.exp() - wanted.float()).to(logits.dtype)


@cache
def compiled_kernel() -> Kernel:
    """Compile the kernel once per process."""
    return compiled(row_gradients_by_comparing, "loss")
