"""A first Triton kernel, forward and backward: the weighted sum of every row. Read it from top to bottom.

    TRITON_INTERPRET=1 python jobs/examples/kernels/weighted_sum.py       without a GPU, in Triton's interpreter
    python jobs/examples/kernels/weighted_sum.py                          on a GPU

    y_r = sum over c of x_rc w_c            x (rows, columns), w (columns,), y (rows,)
    dx_rc = dy_r w_c                        from dy = dL/dy
    dw_c = sum over r of dy_r x_rc

A kernel runs as a grid of programs, here one for each tile of ROWS rows. Each program goes over the columns, COLUMNS at
a time. All rows add to dw, but two programs cannot add to one number without waiting for each other. So each program
writes a partial sum of its own, and torch adds those.
"""

import sys
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS = 16, 64  # size of a tile; Triton needs powers of 2


@triton.jit
def forward_kernel(x, w, y, rows, columns, x_stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # the rows of this program
    total = tl.zeros((ROWS,), tl.float32)
    for begin in range(0, columns, COLUMNS):
        column = begin + tl.arange(0, COLUMNS)
        inside = (row < rows)[:, None] & (column < columns)[None, :]  # the last tiles may extend beyond the tensor
        values = tl.load(x + row[:, None] * x_stride + column[None, :], mask=inside, other=0.0)  # (ROWS, COLUMNS)
        weights = tl.load(w + column, mask=column < columns, other=0.0)  # (COLUMNS,)
        total += tl.sum(values * weights[None, :], axis=1)
    tl.store(y + row, total, mask=row < rows)


@triton.jit
def backward_kernel(x, w, dy, dx, partial, rows, columns, x_stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    of_y = tl.load(dy + row, mask=row < rows, other=0.0)  # (ROWS,)
    for begin in range(0, columns, COLUMNS):
        column = begin + tl.arange(0, COLUMNS)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        values = tl.load(x + row[:, None] * x_stride + column[None, :], mask=inside, other=0.0)
        weights = tl.load(w + column, mask=column < columns, other=0.0)
        tl.store(dx + row[:, None] * columns + column[None, :], of_y[:, None] * weights[None, :], mask=inside)
        share = tl.sum(of_y[:, None] * values, axis=0)  # the sum over the rows of this program
        tl.store(partial + tl.program_id(0) * columns + column, share, mask=column < columns)


class WeightedSum(torch.autograd.Function):
    """`(x * w).sum(1)` of float32 tensors x (rows, columns) and w (columns,)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        x = x.contiguous()
        (rows, columns), y = x.shape, x.new_empty(x.shape[0])
        forward_kernel[(triton.cdiv(rows, ROWS),)](x, w, y, rows, columns, x.stride(0), ROWS, COLUMNS)
        ctx.save_for_backward(x, w)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (x, w), dy = ctx.saved_tensors, gradients[0].contiguous()
        (rows, columns), programs = x.shape, triton.cdiv(x.shape[0], ROWS)
        dx, partial = torch.empty_like(x), x.new_empty(programs, columns)
        backward_kernel[(programs,)](x, w, dy, dx, partial, rows, columns, x.stride(0), ROWS, COLUMNS)
        return dx, partial.sum(0)


def main() -> None:
    """Compare with autograd, and print the largest differences."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(100, 150, device=device, requires_grad=True)
    w = torch.randn(150, device=device, requires_grad=True)
    dy = torch.randn(100, device=device)
    wanted = [*torch.autograd.grad((x * w).sum(1), (x, w), dy), (x * w).sum(1)]
    y = WeightedSum.apply(x, w)
    found = [*torch.autograd.grad(y, (x, w), dy), y]
    for name, one, other in zip(("dx", "dw", "y"), found, wanted, strict=True):
        print(f"{name}: largest difference {(one - other).abs().max().item():.1e}")
    sys.exit(0 if all(torch.allclose(*pair, atol=1e-4) for pair in zip(found, wanted, strict=True)) else 1)


if __name__ == "__main__":
    main()
