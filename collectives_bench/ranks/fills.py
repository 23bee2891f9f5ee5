"""Data whose right result is known: whole numbers that differ by rank, by place and by call.

What an element holds is 1 + a hash of (rank, place, call), modulo as many levels as sums over all ranks stay exact with
in the type at hand; so every partial sum is exact too, in whatever order. Nothing that a result should hold is ever 0
or less, so what nobody wrote (`UNWRITTEN`) is seen. The pattern of places comes round after `PERIOD` elements, a prime
that no chunk or segment is a multiple of.
"""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

PERIOD: Final = 16_411
UNWRITTEN: Final = -1
COMPARED: Final = 2**22  # elements at a time
MASK: Final = 2**32 - 1

DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "int32": torch.int32}
EXACT: Final = {"fp32": 2**24, "bf16": 2**8, "fp16": 2**11, "int32": 2**31 - 1}  # all whole numbers up to it are exact


@dataclass(frozen=True)
class Pattern:
    """The numbers of one operation: their type, where they lie, and how large they may be."""

    dtype: str
    device: torch.device
    terms: int  # how many of them a result may be the sum of

    def __post_init__(self) -> None:
        if self.levels < 2:  # all alike, nothing would be noticed
            raise ValueError(f"{self.dtype} cannot hold a sum over {self.terms} ranks exactly; measure fp32")

    @property
    def levels(self) -> int:
        """How many different numbers there are."""
        return int(EXACT[self.dtype] // self.terms)

    def tile(self, rank: int, call: int, *, start: int = 0, count: int = PERIOD) -> Tensor:
        """Return the numbers of `count` places from `start` on, int64; of PERIOD at most, for then they come round."""
        places = torch.arange(start, start + min(count, PERIOD), device=self.device) % PERIOD
        mixed = (places * 0x9E3779B1 + rank * 0x85EBCA77 + call * 0xC2B2AE3D) & MASK
        for factor in (0x7FEB352D, 0x846CA68B):  # Wellons's lowbias32
            mixed = ((mixed ^ (mixed >> 16)) * factor) & MASK
        return (mixed ^ (mixed >> 15)) % self.levels + 1

    def typed(self, numbers: Tensor) -> Tensor:
        """Return numbers as the type that is sent."""
        return numbers.to(DTYPES[self.dtype])

    def write(self, buffer: Tensor, rank: int, call: int, *, start: int = 0) -> None:
        """Fill a flat buffer with a rank's numbers from place `start` on."""
        tile = self.typed(self.tile(rank, call, start=start, count=buffer.numel()))
        rows, rest = _rows(buffer, tile)
        rows.copy_(tile)
        rest.copy_(tile[: rest.numel()])

    def wrong(self, buffer: Tensor, wanted: Tensor) -> int:
        """Count the elements of a flat buffer that are not those of a tile of the same start, over and over."""
        rows, rest = _rows(buffer, wanted)
        at_once = max(COMPARED // max(wanted.numel(), 1), 1)
        parts = [rows[first : first + at_once] for first in range(0, len(rows), at_once)]
        return sum(_differing(part, wanted) for part in parts) + _differing(rest, wanted[: rest.numel()])

    def wrong_of(self, buffer: Tensor, rank: int, call: int, *, start: int = 0) -> int:
        """Count the elements of a flat buffer that are not a rank's."""
        return self.wrong(buffer, self.typed(self.tile(rank, call, start=start, count=buffer.numel())))

    def wrong_sum(self, buffer: Tensor, call: int, *, start: int = 0, mean: bool = False) -> int:
        """Count the elements of a flat buffer that are not the sum (mean) over all ranks."""
        total = self.tile(0, call, start=start, count=buffer.numel())
        for rank in range(1, self.terms):
            total += self.tile(rank, call, start=start, count=buffer.numel())
        wanted = self.typed(total)
        return self.wrong(buffer, wanted.div_(self.terms) if mean else wanted)


def _differing(found: Tensor, wanted: Tensor) -> int:
    return int(torch.ne(found, wanted).count_nonzero().item())


def _rows(buffer: Tensor, tile: Tensor) -> tuple[Tensor, Tensor]:
    """Return a buffer as whole tiles, (tiles, places of one), and what is left of it."""
    period = tile.numel()
    whole = buffer.numel() // period * period if period else 0  # no period: the buffer is empty too
    return buffer[:whole].view(whole // max(period, 1), period), buffer[whole:]
