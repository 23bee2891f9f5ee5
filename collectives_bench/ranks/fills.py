"""Test data with known results: integers that differ by rank, position and call.

An element is 1 + (hash of rank, position and call) modulo `levels`. The number of levels is so small that sums over all
ranks are exact in the dtype, in any order. Correct values are always positive, so unwritten elements (`UNWRITTEN`) are
detected. The pattern repeats after `PERIOD` elements, a prime that divides no chunk or segment.
"""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

PERIOD: Final = 16_411
UNWRITTEN: Final = -1
COMPARED: Final = 2**22  # number of elements that are compared at once
MASK: Final = 2**32 - 1

DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "int32": torch.int32}
EXACT: Final = {"fp32": 2**24, "bf16": 2**8, "fp16": 2**11, "int32": 2**31 - 1}  # all integers up to this are exact


@dataclass(frozen=True)
class Pattern:
    """The test numbers of one operation, with their dtype, device and range."""

    dtype: str
    device: torch.device
    terms: int  # the largest number of terms in a sum

    def __post_init__(self) -> None:
        if self.levels < 2:  # with only one level, errors would not be detected
            raise ValueError(f"{self.dtype} cannot hold a sum over {self.terms} ranks exactly; measure fp32")

    @property
    def levels(self) -> int:
        """The number of distinct values."""
        return int(EXACT[self.dtype] // self.terms)

    def tile(self, rank: int, call: int, *, start: int = 0, count: int = PERIOD) -> Tensor:
        """Return the int64 numbers at `count` positions from `start`. `count` is at most PERIOD, the period."""
        places = torch.arange(start, start + min(count, PERIOD), device=self.device) % PERIOD
        mixed = (places * 0x9E3779B1 + rank * 0x85EBCA77 + call * 0xC2B2AE3D) & MASK
        for factor in (0x7FEB352D, 0x846CA68B):  # Wellons's lowbias32
            mixed = ((mixed ^ (mixed >> 16)) * factor) & MASK
        return (mixed ^ (mixed >> 15)) % self.levels + 1

    def typed(self, numbers: Tensor) -> Tensor:
        """Convert numbers to the dtype of the messages."""
        return numbers.to(DTYPES[self.dtype])

    def write(self, buffer: Tensor, rank: int, call: int, *, start: int = 0) -> None:
        """Fill a flat buffer with a rank's numbers, starting at position `start`."""
        tile = self.typed(self.tile(rank, call, start=start, count=buffer.numel()))
        rows, rest = _rows(buffer, tile)
        rows.copy_(tile)
        rest.copy_(tile[: rest.numel()])

    def wrong(self, buffer: Tensor, wanted: Tensor) -> int:
        """Count the elements of a flat buffer that differ from repetitions of `wanted`."""
        rows, rest = _rows(buffer, wanted)
        at_once = max(COMPARED // max(wanted.numel(), 1), 1)
        parts = [rows[first : first + at_once] for first in range(0, len(rows), at_once)]
        return sum(_differing(part, wanted) for part in parts) + _differing(rest, wanted[: rest.numel()])

    def wrong_of(self, buffer: Tensor, rank: int, call: int, *, start: int = 0) -> int:
        """Count the elements of a flat buffer that differ from a rank's numbers."""
        return self.wrong(buffer, self.typed(self.tile(rank, call, start=start, count=buffer.numel())))

    def wrong_sum(self, buffer: Tensor, call: int, *, start: int = 0, mean: bool = False) -> int:
        """Count the elements of a flat buffer that differ from the sum, or the mean, over all ranks."""
        total = self.tile(0, call, start=start, count=buffer.numel())
        for rank in range(1, self.terms):
            total += self.tile(rank, call, start=start, count=buffer.numel())
        wanted = self.typed(total)
        return self.wrong(buffer, wanted.div_(self.terms) if mean else wanted)


def _differing(found: Tensor, wanted: Tensor) -> int:
    return int(torch.ne(found, wanted).count_nonzero().item())


def _rows(buffer: Tensor, tile: Tensor) -> tuple[Tensor, Tensor]:
    """Return the buffer's whole tiles, with shape (tiles, PERIOD), and the rest of the buffer."""
    period = tile.numel()
    whole = buffer.numel() // period * period if period else 0  # the period is 0 if the buffer is empty
    return buffer[:whole].view(whole // max(period, 1), period), buffer[whole:]
