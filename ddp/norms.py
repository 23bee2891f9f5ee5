"""The 2-norm of all gradients, and clipping by it: two ways.

    plain_norm           one small all-reduce; its last bits depend on how elements are dealt to tensors and ranks
    reproducible_norm    two small all-reduces; the same bits however they are dealt: a sharded run clips as one process

A float64 sum depends on its order; a sum of whole numbers does not. So squares are written as whole numbers:

    each element times one power of two: the largest magnitude of all ranks comes into [2^15, 2^16)    no rounding
    its square, below 2^32                                                                             each for itself
    = high + low / 2^32, both whole numbers below 2^32; what is smaller is dropped                     each for itself
    sums of at most 2^20 of each: below 2^53, where float64 adds whole numbers without rounding        no rounding
    sums of these over all ranks, as int64 digits of 32 bits                                           no rounding

What is dropped of an element is below 2^-62 of the largest square: a million elements together cannot move the norm by
more than 2^-43 of itself, and 2^31 by 2^-32, if one is large and all others next to nothing. Squares do not overflow.
Of float64 numbers, those below 1e-312 count as zeros. On CUDA the host waits for nothing.
"""

from collections.abc import Iterator, Sequence
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from muster.ddp.checks import device_of
from muster.ddp.gradients import is_dense

SUM_AT_MOST: Final = 2**20  # whole numbers below 2^32 that float64 adds exactly
IN_CACHE: Final = 2**15  # elements of a block on a CPU; and so few float32 squares can be added in float32
DIGIT_BITS: Final = 32
DIGIT: Final = 2**DIGIT_BITS
LARGEST_BITS: Final = 16  # magnitudes are below 2^16, squares below a digit
MANTISSA_BITS: Final = 52  # of float64, whose exponent is kept plus 1023
BIAS: Final = 1023
EPSILON: Final = 1e-6  # torch.nn.utils.clip_grad_norm_'s


@torch.no_grad()
def reproducible_norm(tensors: Sequence[Tensor], group: dist.ProcessGroup | None = None, *, reduce: bool) -> Tensor:
    """Return the 2-norm of all elements of all ranks, a float64 scalar whose bits do not depend on who has which.

    A collective if `reduce`, for ranks without an element too; else this process has everything. One nan makes it nan,
    else one infinity inf. The tensors are on one device.
    """
    device = _device(tensors, group, reduce)
    whole = [each for each in tensors if each.numel()]
    largest = _largest(whole, device)
    if reduce:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    magnitude, is_nan = largest.unbind()
    finite = magnitude.isfinite()
    # the largest is in [2^(biased - 1023), 2^(biased - 1022)); from 16 on, both powers below are float64 numbers
    biased = (torch.where(finite, magnitude, 0.0).view(torch.int64) >> MANTISSA_BITS).clamp_(min=LARGEST_BITS)
    digits = _digits(whole, _power_of_two(LARGEST_BITS + BIAS - 1 - biased))
    if reduce:
        dist.all_reduce(digits, op=dist.ReduceOp.SUM, group=group)
    norm = _value(digits).sqrt() * _power_of_two(biased - (BIAS - 1) - LARGEST_BITS)
    return torch.where(is_nan > 0, torch.nan, torch.where(finite, norm, magnitude))


@torch.no_grad()
def plain_norm(tensors: Sequence[Tensor], group: dist.ProcessGroup | None = None, *, reduce: bool) -> Tensor:
    """Return the 2-norm of all elements of all ranks, a float64 scalar: 16-bit tensors are summed in float32.

    A collective if `reduce`; else this process has everything.
    """
    device = _device(tensors, group, reduce)
    square = torch.zeros((), dtype=torch.float64, device=device)
    for exact in (True, False):
        alike = [each for each in tensors if each.numel() and (each.dtype == torch.float64) is exact]
        if device.type == "cpu":  # which adds a tensor's squares one after another, CUDA by blocks
            alike = [piece for each in alike for piece in _pieces(each, IN_CACHE)]
        if alike:
            norms = torch._foreach_norm(alike, 2, dtype=torch.float64 if exact else torch.float32)
            square += torch.stack(norms).double().square_().sum()
    if reduce:
        dist.all_reduce(square, op=dist.ReduceOp.SUM, group=group)
    return square.sqrt_()


@torch.no_grad()
def clip_by(tensors: Sequence[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale gradients in place so that their norm, which is `norm`, becomes at most `max_norm`.

    As torch.nn.utils.clip_grad_norm_ does: an infinite or nan norm makes gradients nan or zeros. The product is made in
    each tensor's type, of 16 bits in float32 and rounded: element by element, so bits depend on nothing else.
    """
    coefficient = (max_norm / (norm + EPSILON)).clamp_(max=1.0)
    if coefficient.device.type == "cpu" and coefficient == 1.0:
        return  # on CUDA the host would wait to know
    for exact in (True, False):
        alike = [each for each in tensors if (each.dtype == torch.float64) is exact]
        if alike:
            torch._foreach_mul_(alike, coefficient if exact else coefficient.float())


def _device(tensors: Sequence[Tensor], group: dist.ProcessGroup | None, reduce: bool) -> torch.device:
    """Return where the tensors are; a rank without any asks what its group can send."""
    if tensors:
        return tensors[0].device
    return device_of(group) if reduce else torch.device("cpu")


def _largest(tensors: list[Tensor], device: torch.device) -> Tensor:
    """Return the largest magnitude, and 1 if there is a nan: of both a maximum can be asked of any backend."""
    if not tensors:
        return torch.zeros(2, dtype=torch.float64, device=device)
    found = torch.stack([each.double() for each in torch._foreach_norm(tensors, float("inf"))]).amax()
    return torch.stack([found.nan_to_num(nan=torch.inf, posinf=torch.inf), found.isnan().double()])


def _digits(tensors: list[Tensor], scale: Tensor) -> Tensor:
    """Return the sum of the squares of the scaled elements, as int64 [2^32s, ones, 2^-32s]."""
    sums = [torch.zeros(2, dtype=torch.float64, device=scale.device)]
    count = min(SUM_AT_MOST if scale.is_cuda else IN_CACHE, sum(each.numel() for each in tensors))
    memory = torch.empty(2, count, dtype=torch.float64, device=scale.device)
    for squares in _blocks(tensors, memory[0]):
        squares.mul_(scale).square_()
        high = torch.floor(squares, out=memory[1, : squares.numel()])
        sums.append(torch.empty_like(sums[0]))
        torch.sum(high, 0, out=sums[-1][0])
        low = squares.sub_(high).mul_(DIGIT).floor_()
        torch.sum(low, 0, out=sums[-1][1])
    # sums are below 2^52; carried at once, for all of 2^31 large elements would not fit. Not finite: the norm is known
    high, low = torch.stack(sums).nan_to_num_(nan=0.0, posinf=0.0).long().unbind(1)
    columns = [high >> DIGIT_BITS, (high % DIGIT) + (low >> DIGIT_BITS), low % DIGIT]
    return torch.stack([column.sum() for column in columns])


def _blocks(tensors: list[Tensor], memory: Tensor) -> Iterator[Tensor]:
    """Copy all elements into `memory`, as float64; yield what is filled when it is full. Small tensors share."""
    filled = 0
    for tensor in tensors:
        for piece in _pieces(tensor, memory.numel()):
            if filled + piece.numel() > memory.numel():
                yield memory[:filled]
                filled = 0
            memory[filled : filled + piece.numel()].copy_(piece)
            filled += piece.numel()
    if filled:
        yield memory[:filled]


def _pieces(tensor: Tensor, count: int) -> Sequence[Tensor]:
    """Cut a tensor's elements, in any order, into at most `count` each: views, unless there are gaps between them."""
    if is_dense(tensor):
        flat = tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    else:
        flat = tensor.reshape(-1)
    return torch.split(flat, count)


def _value(digits: Tensor) -> Tensor:
    """Return the number that digits are, in float64: digits that are one number give the same bits."""
    high, middle, low = digits.unbind()
    middle = middle + (low >> DIGIT_BITS)
    high = high + (middle >> DIGIT_BITS)
    fraction = (middle % DIGIT).double() + (low % DIGIT).double() / DIGIT
    return high.double() * DIGIT + fraction


def _power_of_two(exponent: Tensor) -> Tensor:
    """Return 2 to whole numbers in [-1022, 1023], by the bits of float64: `pow` and `ldexp` round, or overflow."""
    return ((exponent + BIAS) << MANTISSA_BITS).view(torch.float64)
