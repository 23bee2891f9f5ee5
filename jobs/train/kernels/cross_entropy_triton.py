"""The cross-entropy of rows of logits and its gradient, as one Triton kernel that replaces the logits by the gradient.

    loss_r = log(sum over c of exp(x_rc)) - x_r,target        x (rows, classes), targets (rows,)
    dx_rc = exp(x_rc - max_r) / sum_r - [c is the target]     of the sum of the losses

A row whose target is the ignored number has no loss and no gradient. Any other target that is no class makes the loss
NaN.

A program per row goes over its columns twice. First it finds the maximum and the sum of the exponentials; when it finds
a larger value, it scales the sum so far (Milakov and Gimelshein 2018). Then it writes the gradient. By then, the row
is still in the cache, so memory sees one read and one write. Sums are float32.
"""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK: Final = 4096  # columns at a time
WARPS: Final = 4
LEAST: Final = -3.0e38  # less than any logit but -inf, and finite: a difference of infinities is NaN


@triton.jit
def _loss_and_gradient(
    x, targets, losses,
    STRIDE: tl.constexpr, CLASSES: tl.constexpr, BLOCK: tl.constexpr, LEAST: tl.constexpr, IGNORED: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    start, target = x + row * STRIDE, tl.load(targets + row)
    most, total = tl.full((), LEAST, tl.float32), tl.zeros((), tl.float32)
    for begin in range(0, CLASSES, BLOCK):
        values = tl.load(start + begin + column, mask=begin + column < CLASSES, other=LEAST).to(tl.float32)
        higher = tl.maximum(most, tl.max(values, 0))
        total = total * tl.exp(most - higher) + tl.sum(tl.exp(values - higher), 0)
        most = higher
    is_class, counts = (target >= 0) & (target < CLASSES), target != IGNORED
    wanted = tl.load(start + target, mask=is_class, other=float("nan")).to(tl.float32)
    tl.store(losses + row, tl.where(counts, most + tl.log(total) - wanted, 0.0))
    scale = tl.where(counts, 1.0, 0.0)
    tl.debug_barrier()  # the logit of the target is read before it is replaced
    for begin in range(0, CLASSES, BLOCK):
        inside = begin + column < CLASSES
        values = tl.load(start + begin + column, mask=inside, other=LEAST).to(tl.float32)
        gradient = tl.exp(values - most) / total - tl.where(begin + column == target, 1.0, 0.0)
        tl.store(start + begin + column, (scale * gradient).to(x.dtype.element_ty), mask=inside)


def fused_row_gradients(logits: Tensor, targets: Tensor, *, ignored: int) -> Tensor:
    """Return the sum of losses of contiguous logits (rows, classes), and replace them by its gradient."""
    rows, classes = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    _loss_and_gradient[(rows,)](
        logits, targets, losses, logits.stride(0), classes, min(BLOCK, triton.next_power_of_2(classes)), LEAST, ignored,
        num_warps=WARPS,
    )  # fmt: skip
    return losses.sum()
