"""The 2-norm of all gradients, and clipping by it, in two ways.

    plain_norm           one small all-reduce; its last bits depend on how elements are split into tensors and ranks
    reproducible_norm    two small all-reduces; the same bits for every split, so a sharded run clips as one process

The result of a float64 sum depends on the order of additions, but a sum of integers does not. So the squares are
converted to integers:

    each element times one power of two: the largest magnitude of all ranks is then in [2^15, 2^16)    no rounding
    its square, below 2^32                                                                             rounds a square
    = high + low / 2^32, both integers below 2^32; smaller digits are dropped                          rounds a square
    sums of at most 2^20 of each: below 2^53, where float64 adds integers without rounding             no rounding
    sums of these over all ranks, as int64 digits of 32 bits                                           no rounding

The dropped part of each square is below 2^-62 of the largest square. In the worst case, one element is large and all
others are close to zero. Then a million dropped parts change the norm by at most 2^-43 of its value, and 2^31 of them
by 2^-32. Squares do not overflow. float64 numbers below 1e-312 count as zeros. On CUDA the host never waits.
"""

from collections.abc import Iterator, Sequence
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from muster.ddp.checks import device_of
from muster.ddp.gradients import is_dense

SUM_AT_MOST: Final = 2**20  # the sum of at most this many integers below 2^32 is exact in float64
IN_CACHE: Final = 2**15  # elements per block on a CPU; so few that their squares can be added in float32
DIGIT_BITS: Final = 32
DIGIT: Final = 2**DIGIT_BITS
LARGEST_BITS: Final = 16  # magnitudes are scaled below 2^16, so that squares are below DIGIT
MANTISSA_BITS: Final = 52  # float64 stores the exponent plus BIAS
BIAS: Final = 1023
EPSILON: Final = 1e-6  # the constant of torch.nn.utils.clip_grad_norm_


@torch.no_grad()
def reproducible_norm(tensors: Sequence[Tensor], group: dist.ProcessGroup | None = None, *, reduce: bool) -> Tensor:
    """Return the 2-norm of all elements on all ranks, a float64 scalar.

    Its bits do not depend on how the elements are distributed over ranks and tensors. With `reduce` this is a
    collective, which must also be called by ranks without elements. Without it, this process must have all elements.
    The result is NaN if any element is NaN, else infinite if any element is infinite. All tensors must be on one
    device.
    """
    device = _device(tensors, group, reduce)
    whole = [each for each in tensors if each.numel()]
    largest = _largest(whole, device)
    if reduce:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    magnitude, is_nan = largest.unbind()
    finite = magnitude.isfinite()
    # The largest magnitude is in [2^(biased - 1023), 2^(biased - 1022)). With biased >= 16, float64 can represent both
    # powers of two below.
    biased = (torch.where(finite, magnitude, 0.0).view(torch.int64) >> MANTISSA_BITS).clamp_(min=LARGEST_BITS)
    digits = _digits(whole, _power_of_two(LARGEST_BITS + BIAS - 1 - biased))
    if reduce:
        dist.all_reduce(digits, op=dist.ReduceOp.SUM, group=group)
    norm = _value(digits).sqrt() * _power_of_two(biased - (BIAS - 1) - LARGEST_BITS)
    return torch.where(is_nan > 0, torch.nan, torch.where(finite, norm, magnitude))


@torch.no_grad()
def plain_norm(tensors: Sequence[Tensor], group: dist.ProcessGroup | None = None, *, reduce: bool) -> Tensor:
    """Return the 2-norm of all elements on all ranks, a float64 scalar. 16-bit tensors are summed in float32.

    With `reduce` this is a collective. Without it, this process must have all elements.
    """
    device = _device(tensors, group, reduce)
    square = torch.zeros((), dtype=torch.float64, device=device)
    for exact in (True, False):
        alike = [each for each in tensors if each.numel() and (each.dtype == torch.float64) is exact]
        if device.type == "cpu":  # torch adds a tensor's squares in sequence on CPUs, but in blocks on CUDA
            alike = [piece for each in alike for piece in _pieces(each, IN_CACHE)]
        if alike:
            norms = torch._foreach_norm(alike, 2, dtype=torch.float64 if exact else torch.float32)
            square += torch.stack(norms).double().square_().sum()
    if reduce:
        dist.all_reduce(square, op=dist.ReduceOp.SUM, group=group)
    return square.sqrt_()


@torch.no_grad()
def clip_by(tensors: Sequence[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale gradients in place so that their norm, now `norm`, becomes at most `max_norm`.

    As in torch.nn.utils.clip_grad_norm_, an infinite or NaN norm makes gradients NaN or zero. Products are computed in
    the dtype of each tensor (for 16-bit types in float32, then rounded), so the bits do not depend on how tensors are
    split.
    """
    coefficient = (max_norm / (norm + EPSILON)).clamp_(max=1.0)
    if coefficient.device.type == "cpu" and coefficient == 1.0:
        return  # on CUDA this check would make the host wait
    for exact in (True, False):
        alike = [each for each in tensors if (each.dtype == torch.float64) is exact]
        if alike:
            torch._foreach_mul_(alike, coefficient if exact else coefficient.float())


def _device(tensors: Sequence[Tensor], group: dist.ProcessGroup | None, reduce: bool) -> torch.device:
    """Return the device of the tensors. If there are none, return the device of the group's communication."""
    if tensors:
        return tensors[0].device
    return device_of(group) if reduce else torch.device("cpu")


def _largest(tensors: list[Tensor], device: torch.device) -> Tensor:
    """Return [largest magnitude, 1 if there is a NaN else 0], because every backend can reduce both by maximum."""
    if not tensors:
        return torch.zeros(2, dtype=torch.float64, device=device)
    found = torch.stack([each.double() for each in torch._foreach_norm(tensors, float("inf"))]).amax()
    return torch.stack([found.nan_to_num(nan=torch.inf, posinf=torch.inf), found.isnan().double()])


def _digits(tensors: list[Tensor], scale: Tensor) -> Tensor:
    """Return the sum of squares of the scaled elements as three int64 digits: multiples of 2^32, 1 and 2^-32."""
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
    # Each sum is below 2^52. Carry before adding sums, because 2^31 large elements would overflow int64. Sums that are
    # not finite become 0, because the norm is then infinite or NaN whatever the digits are.
    high, low = torch.stack(sums).nan_to_num_(nan=0.0, posinf=0.0).long().unbind(1)
    columns = [high >> DIGIT_BITS, (high % DIGIT) + (low >> DIGIT_BITS), low % DIGIT]
    return torch.stack([column.sum() for column in columns])


def _blocks(tensors: list[Tensor], memory: Tensor) -> Iterator[Tensor]:
    """Copy all elements into `memory` as float64, block by block; yield each block. Small tensors share a block."""
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
    """Split a tensor's elements, in any order, into views of at most `count` elements.

    If the tensor has gaps, copy it first.
    """
    if is_dense(tensor):
        flat = tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    else:
        flat = tensor.reshape(-1)
    return torch.split(flat, count)


def _value(digits: Tensor) -> Tensor:
    """Return the value of digits in float64. Its bits depend on the value alone, not on carries between the digits."""
    high, middle, low = digits.unbind()
    middle = middle + (low >> DIGIT_BITS)
    high = high + (middle >> DIGIT_BITS)
    fraction = (middle % DIGIT).double() + (low % DIGIT).double() / DIGIT
    return high.double() * DIGIT + fraction


def _power_of_two(exponent: Tensor) -> Tensor:
    """Return 2 to the power of integers in [-1022, 1023].

    The exponent bits of float64 are set directly, because `pow` and `ldexp` round or overflow.
    """
    return ((exponent + BIAS) << MANTISSA_BITS).view(torch.float64)
