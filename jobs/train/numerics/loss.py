"""Compute a GPT's head and cross-entropy together, in chunks, so that only one chunk of logits exists.

With a vocabulary of 50,304 the logits of 32 x 1,024 tokens take 3.3 GB in 16 bits and 6.6 GB in 32, several times per
step. Here the forward computes the gradients, too: the gradient of a chunk's logits replaces them, and gives those of
input and weight. The backward only scales these. Logarithms, sums and differences are float32.

The stored gradients are those of the sum of the losses, not the mean. They may exceed the range of float16, where no
loss scale could help, so float16 does not use this loss.

On GPUs one Triton kernel computes loss and gradient of a chunk (`kernels/cross_entropy_triton.py`). Without Triton or a
C compiler, PyTorch's operators or compiled ones do. The vocabulary is padded there while the loss is computed, because
matrix products whose rows do not begin at multiples of 16 bytes are slow. Parameters and checkpoints keep their shapes.
The added logits are -inf, so their gradients are 0.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from muster.jobs.train.kernels.rms_norm import why_no_triton
from muster.jobs.train.numerics.pieces import compiled
from muster.pipe.weighing import IGNORED, factor_of

CHUNK_BYTES: Final = 2**28  # size of a chunk of logits
COMPILED_CHUNK_BYTES: Final = 2**32  # compiled code reads and writes logits once, so one large chunk is best
FUSED_CHUNK_BYTES: Final = 2**29  # the kernel needs no other memory than a chunk
PADDED: Final = {"cuda": 64}  # devices that pad the vocabulary, and the number of which it becomes a multiple

Kernel = Callable[[Tensor, Tensor], Tensor]


def chunked_loss(
    head: nn.Module,
    x: Tensor,
    targets: Tensor,
    *,
    compile: bool = False,
    chunk_bytes: int | None = None,
    multiple: int | None = None,
) -> Tensor:
    """Return the mean cross-entropy of a linear head's logits of x (..., d_model) against targets (...).

    The vocabulary is padded to a `multiple` (None: as the device needs it).
    """
    assert isinstance(head, nn.Linear)
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    more = -head.out_features % (multiple or PADDED.get(device, 1))
    kernel, most = kernel_of(device, compile=compile)
    most = chunk_bytes or most
    rows = max(1, most // ((head.out_features + more) * dtype.itemsize))
    weight, bias = head.weight.to(dtype), None if head.bias is None else head.bias.to(dtype)
    if more:
        weight = functional.pad(weight, (0, 0, 0, more))
        bias = None if bias is None else functional.pad(bias, (0, more))
    task = ChunkedTask(rows, head.out_features, kernel)
    flat = x.flatten(0, -2).to(dtype)
    loss_sum: Tensor = _LinearLoss.apply(flat, weight, bias, targets.flatten(), task, torch.is_grad_enabled())  # type: ignore[no-untyped-call]
    if is_fused(device):
        return loss_sum / counted(targets).clamp(min=1)  # without any target that counts, no gradient is NaN
    return loss_sum / targets.numel() * factor_of(counted(targets), torch.full_like(loss_sum, targets.numel()))


@dataclass(frozen=True)
class ChunkedTask:
    """The rows of a chunk, the classes without padding, and the function that computes loss and gradient of a chunk."""

    rows: int
    classes: int
    kernel: Kernel


class _LinearLoss(torch.autograd.Function):
    """The summed loss for x (rows, d_model), weight (padded, d_model), bias (padded,) or None, targets (rows,)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        task: ChunkedTask,
        backward_follows: bool,
    ) -> Tensor:
        total, rows = torch.zeros((), dtype=torch.float32, device=x.device), task.rows
        of_input = torch.empty_like(x)
        of_weight: Tensor | None = None
        of_bias: Tensor | None = None
        for start in range(0, len(x), rows):
            chunk = x[start : start + rows]
            gradient = functional.linear(chunk, weight, bias)  # logits, until the kernel replaces them
            if gradient.shape[-1] > task.classes:
                gradient[:, task.classes :] = -math.inf
            total += task.kernel(gradient, targets[start : start + rows])
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
        return (*gradients, None, None, None)


def _added(total: Tensor | None, more: Tensor, *, last: bool) -> Tensor:
    """Add in float32, and round once at the end."""
    if total is None:
        return more if last else more.float()
    total += more
    return total.to(more.dtype) if last else total


def kernel_of(device: str, *, compile: bool) -> tuple[Kernel, int]:
    """Return the function that computes a chunk's loss and gradient on a type of device, and the bytes of a chunk."""
    if is_fused(device):
        from muster.jobs.train.kernels.cross_entropy_triton import fused_row_gradients

        chunk_bytes = COMPILED_CHUNK_BYTES if compile else FUSED_CHUNK_BYTES
        return partial(fused_row_gradients, ignored=IGNORED), chunk_bytes
    return (compiled_kernel(), COMPILED_CHUNK_BYTES) if compile else (row_gradients, CHUNK_BYTES)


@cache
def is_fused(device: str) -> bool:
    """Return True if a type of device runs the Triton kernel."""
    return device == "cuda" and not why_no_triton(device)


def counted(targets: Tensor) -> Tensor:
    """Return the number of targets that are not ignored."""
    return (targets != IGNORED).sum()


def row_gradients(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the sum of losses. Replace logits (rows, classes) by its gradient: softmax, minus 1 at the target.

    Rows with an ignored target have neither.
    """
    log_p = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    ignored = (targets == IGNORED)[:, None]
    wanted = targets[:, None].where(~ignored, 0)
    loss_sum = -log_p.gather(-1, wanted).masked_fill(ignored, 0.0).sum()
    logits.copy_(log_p.exp_().scatter_add_(-1, wanted, log_p.new_full((), -1.0).expand_as(wanted)))
    logits.masked_fill_(ignored, 0.0)
    return loss_sum


def row_gradients_by_comparing(logits: Tensor, targets: Tensor) -> Tensor:
    """Compute `row_gradients` without a scatter, so that it compiles to one kernel that writes in place."""
    log_p = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    wanted = torch.arange(logits.shape[-1], device=logits.device) == targets[:, None]  # (rows, classes)
    loss_sum = -torch.where(wanted, log_p, 0.0).sum()
    logits.copy_((log_p.exp() - wanted.float()) * (targets != IGNORED)[:, None])
    return loss_sum


@cache
def compiled_kernel() -> Kernel:
    """Compile the kernel once per process."""
    return compiled(row_gradients_by_comparing, "loss")
