"""RMSNorm's forward and backward as one Triton kernel each; `rms_norm.py` has the formulas.

    forward    a program per block of rows: loads x once, writes y
    backward   as many programs as fit the GPU; each takes every P-th block of rows, with loads of the next blocks under
               way, and adds up its part of dg in registers; torch adds the parts

The backward computes r again, because it loads x anyway. In units of the traffic of copying x, the forward moves 1
(reads x, writes y), and the backward 1.5 (reads x and dy, writes dx).
"""

from functools import cache
from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK: Final = 4096  # elements of a block of rows in the backward; a wider row is a block of its own
NARROW_BYTES: Final = 8192  # largest size of a block of x with which two programs run on each multiprocessor


@triton.jit
def _forward(x, g, y, rows, x_stride, EPS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # (ROWS,)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
    values = tl.load(x + row[:, None] * x_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    r = tl.rsqrt(tl.sum(values * values, 1) / WIDTH + EPS)
    weight = tl.load(g + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    found = values * r[:, None] * weight[None, :]
    tl.store(y + row[:, None] * WIDTH + column[None, :], found.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    x, g, dy, dx, partial, rows, x_stride, dy_stride, turns,
    EPS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    weight = tl.load(g + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    of_weight = tl.zeros((BLOCK,), tl.float32)
    for turn in tl.range(0, turns, num_stages=STAGES):
        row = (turn * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
        values = tl.load(x + row[:, None] * x_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
        of_y = tl.load(dy + row[:, None] * dy_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
        r = tl.rsqrt(tl.sum(values * values, 1) / WIDTH + EPS)[:, None]
        normal, scaled = values * r, of_y * weight[None, :]
        of_x = r * (scaled - normal * (tl.sum(scaled * normal, 1)[:, None] / WIDTH))  # r^3 could underflow
        tl.store(dx + row[:, None] * WIDTH + column[None, :], of_x.to(dx.dtype.element_ty), mask=inside)
        of_weight += tl.sum(of_y * normal, 0)
    tl.store(partial + tl.program_id(0) * WIDTH + column, of_weight, mask=column < WIDTH)


class BackwardLaunch(NamedTuple):
    """How the backward is launched."""

    rows: int  # number of rows in a block
    warps: int
    stages: int  # number of blocks in the software pipeline: blocks being loaded, and one being computed
    programs: int


class FusedRmsNormFunction(torch.autograd.Function):
    """RMSNorm by the kernels above: x (..., n) of float32, bfloat16 or float16, weight (n,)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        flat = _rows_of(x)
        (rows, width), block = flat.shape, triton.next_power_of_2(x.shape[-1])
        y = torch.empty(flat.shape, dtype=x.dtype, device=x.device)
        if rows:
            several = max(1, min(2, 2048 // block))
            warps = 4 if block <= 2 * BLOCK else 16
            _forward[(triton.cdiv(rows, several),)](
                flat, weight, y, rows, flat.stride(0), eps, width, several, block, num_warps=warps
            )
        ctx.save_for_backward(flat, weight)
        ctx.eps, ctx.shape = eps, x.shape
        return y.view(x.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        dy, (rows, width) = _rows_of(gradients[0]), x.shape
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if not rows:
            return dx.view(ctx.shape), torch.zeros_like(weight), None
        block = triton.next_power_of_2(width)
        launch = backward_launch(block, x.element_size(), rows, x.device)
        partial = torch.empty(launch.programs, width, dtype=torch.float32, device=x.device)
        turns = triton.cdiv(rows, launch.rows * launch.programs)
        _backward[(launch.programs,)](
            x, weight, dy, dx, partial, rows, x.stride(0), dy.stride(0), turns,
            ctx.eps, width, launch.rows, block, launch.stages, num_warps=launch.warps,
        )  # fmt: skip
        return dx.view(ctx.shape), partial.sum(0).to(weight.dtype), None


def backward_launch(block: int, element_size: int, rows: int, device: torch.device) -> BackwardLaunch:
    """Choose the launch of the backward for rows padded to `block` elements, as measured on an H200."""
    several = max(1, BLOCK // block)
    nbytes = several * block * element_size
    processors, shared = _device_limits(device)
    stages = next(count for count in (3, 2, 1) if 2 * (count - 1) * nbytes <= shared)
    programs = processors * (2 if nbytes <= NARROW_BYTES else 1)
    return BackwardLaunch(several, 4 if block <= BLOCK else 16, stages, min(programs, triton.cdiv(rows, several)))


@cache
def _device_limits(device: torch.device) -> tuple[int, int]:
    """Return the multiprocessors of a GPU and the bytes of shared memory of each; small numbers for the interpreter."""
    if device.type != "cuda":
        return 4, 1 << 17
    found = torch.cuda.get_device_properties(device)
    return found.multi_processor_count, getattr(found, "shared_memory_per_block_optin", 0)


def _rows_of(x: Tensor) -> Tensor:
    """Return x (..., n) as (rows, n) whose elements within a row are adjacent; copied if they are not."""
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(-1) == 1 or flat.shape[-1] == 1 else flat.contiguous()
