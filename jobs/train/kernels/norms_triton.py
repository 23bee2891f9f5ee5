"""RMSNorm and LayerNorm, forward and backward as one Triton kernel each.

The formulas are in `rms_norm.py` and `layer_norm.py`. With a bias, the norm is LayerNorm: rows are centred first.

    forward    a program per block of rows: loads x once, writes y
    backward   as many programs as fit the GPU; each takes every P-th block of rows, with loads of the next blocks under
               way, and adds up its parts of dg and db in registers; a third kernel adds the parts

The backward computes r again, because it loads x anyway. In units of the traffic of copying x, the forward moves 1
(reads x, writes y), and the backward 1.5 (reads x and dy, writes dx). The backward begins with the last rows, some of
which are still in the cache after the forward.

Triton's blocks are powers of two. A row of another width is a head and a tail, both powers of two, if these have fewer
elements than the next power of two: 5,000 elements are 4,096 and 1,024 instead of 8,192. Widths and strides are
constants of the compiled kernels, so that loads are as wide as their alignment allows.
"""

from functools import cache
from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_BYTES: Final = 16384  # a block of x in the backward; two programs with smaller blocks share a multiprocessor
NARROW_BYTES: Final = 4096  # a smaller row is in a block of half the size
WIDE: Final = 8192  # elements; the forward uses more warps for wider rows
PARTS, PART_COLUMNS = 64, 16  # of a tile of the third kernel


@triton.jit
def _load(source, row, column, rows, STRIDE: tl.constexpr, WIDTH: tl.constexpr):
    inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
    return tl.load(source + row[:, None] * STRIDE + column[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _store(target, row, column, rows, WIDTH: tl.constexpr, values):
    inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
    tl.store(target + row[:, None] * WIDTH + column[None, :], values.to(target.dtype.element_ty), mask=inside)


@triton.jit
def _columns(source, column, WIDTH: tl.constexpr):
    return tl.load(source + column, mask=column < WIDTH, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _less(x, mean, column, WIDTH: tl.constexpr):
    return tl.where((column < WIDTH)[None, :], x - mean, 0.0)


@triton.jit
def _forward(
    x, g, b, y, rows,
    STRIDE: tl.constexpr, EPS: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, HEAD)
    x0 = _load(x, row, head, rows, STRIDE, WIDTH)  # (ROWS, HEAD)
    if TAIL:
        tail = HEAD + tl.arange(0, TAIL)
        x1 = _load(x, row, tail, rows, STRIDE, WIDTH)
    if BIAS:
        total = tl.sum(x0, 1)
        if TAIL:
            total += tl.sum(x1, 1)
        mean = (total / WIDTH)[:, None]
        x0 = _less(x0, mean, head, WIDTH)
        if TAIL:
            x1 = _less(x1, mean, tail, WIDTH)
    square = tl.sum(x0 * x0, 1)
    if TAIL:
        square += tl.sum(x1 * x1, 1)
    r = tl.rsqrt(square / WIDTH + EPS)[:, None]
    y0 = x0 * r * _columns(g, head, WIDTH)
    if BIAS:
        y0 += _columns(b, head, WIDTH)
    _store(y, row, head, rows, WIDTH, y0)
    if TAIL:
        y1 = x1 * r * _columns(g, tail, WIDTH)
        if BIAS:
            y1 += _columns(b, tail, WIDTH)
        _store(y, row, tail, rows, WIDTH, y1)


@triton.jit
def _backward(
    x, g, dy, dx, partial, rows, turns,
    X_STRIDE: tl.constexpr, DY_STRIDE: tl.constexpr, EPS: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr, STAGES: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    head = tl.arange(0, HEAD)
    g0, of_g0, of_b0 = _columns(g, head, WIDTH), tl.zeros((HEAD,), tl.float32), tl.zeros((HEAD,), tl.float32)
    if TAIL:
        tail = HEAD + tl.arange(0, TAIL)
        g1, of_g1, of_b1 = _columns(g, tail, WIDTH), tl.zeros((TAIL,), tl.float32), tl.zeros((TAIL,), tl.float32)
    for turn in tl.range(0, turns, num_stages=STAGES):
        block = (turns - turn) * tl.num_programs(0) - 1 - tl.program_id(0)  # the last rows first
        row = block.to(tl.int64) * ROWS + tl.arange(0, ROWS)
        x0, dy0 = _load(x, row, head, rows, X_STRIDE, WIDTH), _load(dy, row, head, rows, DY_STRIDE, WIDTH)
        scaled0 = dy0 * g0
        if TAIL:
            x1, dy1 = _load(x, row, tail, rows, X_STRIDE, WIDTH), _load(dy, row, tail, rows, DY_STRIDE, WIDTH)
            scaled1 = dy1 * g1
        if BIAS:
            total, of_mean = tl.sum(x0, 1), tl.sum(scaled0, 1)
            if TAIL:
                total, of_mean = total + tl.sum(x1, 1), of_mean + tl.sum(scaled1, 1)
            x0 = _less(x0, (total / WIDTH)[:, None], head, WIDTH)
            if TAIL:
                x1 = _less(x1, (total / WIDTH)[:, None], tail, WIDTH)
        square, dot = tl.sum(x0 * x0, 1), tl.sum(x0 * scaled0, 1)
        if TAIL:
            square, dot = square + tl.sum(x1 * x1, 1), dot + tl.sum(x1 * scaled1, 1)
        r = tl.rsqrt(square / WIDTH + EPS)
        r, mean = r[:, None], (r * dot / WIDTH)[:, None]  # r^3 could underflow
        normal0 = x0 * r
        of_x0 = scaled0 - normal0 * mean
        if BIAS:
            of_x0 -= (of_mean / WIDTH)[:, None]
            of_b0 += tl.sum(dy0, 0)
        _store(dx, row, head, rows, WIDTH, r * of_x0)
        of_g0 += tl.sum(dy0 * normal0, 0)
        if TAIL:
            normal1 = x1 * r
            of_x1 = scaled1 - normal1 * mean
            if BIAS:
                of_x1 -= (of_mean / WIDTH)[:, None]
                of_b1 += tl.sum(dy1, 0)
            _store(dx, row, tail, rows, WIDTH, r * of_x1)
            of_g1 += tl.sum(dy1 * normal1, 0)
    begin = partial + tl.program_id(0) * WIDTH
    tl.store(begin + head, of_g0, mask=head < WIDTH)
    if TAIL:
        tl.store(begin + tail, of_g1, mask=tail < WIDTH)
    if BIAS:
        begin += tl.num_programs(0) * WIDTH
        tl.store(begin + head, of_b0, mask=head < WIDTH)
        if TAIL:
            tl.store(begin + tail, of_b1, mask=tail < WIDTH)


@triton.jit
def _add_parts(partial, dg, parts, WIDTH: tl.constexpr, PARTS: tl.constexpr, COLUMNS: tl.constexpr):
    column, total = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.zeros((PARTS, COLUMNS), tl.float32)
    for begin in range(0, parts, PARTS):
        total += _load(partial, begin + tl.arange(0, PARTS), column, parts, WIDTH, WIDTH)
    tl.store(dg + column, tl.sum(total, 0).to(dg.dtype.element_ty), mask=column < WIDTH)


class BackwardLaunch(NamedTuple):
    """How the backward is launched."""

    rows: int  # number of rows in a block
    warps: int
    stages: int  # number of blocks in the software pipeline: blocks being loaded, and one being computed
    programs: int


class FusedNorm(torch.autograd.Function):
    """A norm by the kernels above: x (..., n) of float32, bfloat16 or float16; weight and bias (n,); y of `dtype`.

    Without a bias it is RMSNorm, with one LayerNorm.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, dtype: torch.dtype) -> Tensor:
        flat = _rows_of(x)
        rows, width = flat.shape
        y = torch.empty(flat.shape, dtype=dtype, device=x.device)
        if rows:
            head, tail = parts_of(width)
            several = max(1, min(2, 2048 // (head + tail)))
            warps = 4 if head + tail <= WIDE else 16
            _forward[(triton.cdiv(rows, several),)](
                flat, weight, bias, y, rows, flat.stride(0), eps, width, several, head, tail, bias is not None,
                num_warps=warps,
            )  # fmt: skip
        ctx.save_for_backward(flat, weight, bias)
        ctx.eps, ctx.shape = eps, x.shape
        return y.view(x.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None, None]:
        x, weight, bias = ctx.saved_tensors
        dy, (rows, width) = _rows_of(gradients[0]), x.shape
        dx, dg = torch.empty(x.shape, dtype=x.dtype, device=x.device), torch.empty_like(weight)
        db = None if bias is None else torch.empty_like(bias)
        if not rows:
            return dx.view(ctx.shape), dg.zero_(), None if db is None else db.zero_(), None, None
        head, tail = parts_of(width)
        launch = backward_launch(head + tail, x.element_size(), rows, x.device)
        partial = torch.empty(1 + (db is not None), launch.programs, width, dtype=torch.float32, device=x.device)
        turns = triton.cdiv(rows, launch.rows * launch.programs)
        _backward[(launch.programs,)](
            x, weight, dy, dx, partial, rows, turns,
            x.stride(0), dy.stride(0), ctx.eps, width, launch.rows, head, tail, launch.stages, db is not None,
            num_warps=launch.warps,
        )  # fmt: skip
        for parts, total in zip(partial, (dg, db), strict=False):
            _add_parts[(triton.cdiv(width, PART_COLUMNS),)](parts, total, launch.programs, width, PARTS, PART_COLUMNS)
        return dx.view(ctx.shape), dg, db, None, None


def parts_of(width: int) -> tuple[int, int]:
    """Return the sizes of a row's head and tail; a tail of 0 if one block is as small."""
    whole = triton.next_power_of_2(width)
    head = whole // 2
    tail = triton.next_power_of_2(width - head) if width > head else 0
    return (head, tail) if 0 < head + tail < whole else (whole, 0)


def backward_launch(elements: int, element_size: int, rows: int, device: torch.device) -> BackwardLaunch:
    """Choose the launch of the backward for rows padded to this many elements, as measured on an H200."""
    row_bytes = elements * element_size
    most = BLOCK_BYTES if row_bytes >= NARROW_BYTES else BLOCK_BYTES // 2
    several = max(1, most // (triton.next_power_of_2(elements) * element_size))
    nbytes = several * row_bytes
    is_small = nbytes < BLOCK_BYTES
    processors, shared = _device_limits(device)
    stages = next(count for count in (3, 2, 1) if 2 * (count - 1) * nbytes * (1 + is_small) <= shared)
    programs = min(processors * (1 + is_small), triton.cdiv(rows, several))
    return BackwardLaunch(several, 4 if is_small else 8 if several > 1 else 16, stages, programs)


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
