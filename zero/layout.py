"""Who holds what of tensors laid side by side: a pure function of their sizes and the number of ranks.

tensors    | a a a a a a a | b b b | c c c c c c | pad
rank 0       a a a a a                                     shards differ by one element at most, whatever the
rank 1                 a a   b b b                         tensors are: a rank holds slices of some of them
rank 2                               c c c c c
rank 3                                         c   . .
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate


@dataclass(frozen=True)
class Slice:
    """Elements [start, stop) of one tensor, and where in the shard of the rank that holds them they begin."""

    tensor: int
    start: int
    stop: int
    offset: int

    @property
    def elements(self) -> int:
        """How many they are."""
        return self.stop - self.start


@dataclass(frozen=True)
class Layout:
    """Tensors of `sizes` elements side by side, at multiples of `align` elements, cut for `ranks`."""

    sizes: tuple[int, ...]
    ranks: int
    align: int = 1

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each tensor begins."""
        return (0, *accumulate(-(-size // self.align) * self.align for size in self.sizes))[:-1]

    @cached_property
    def length(self) -> int:
        """Elements of the whole, with what lies between the tensors and at the end."""
        extent = self.offsets[-1] + self.sizes[-1] if self.sizes else 0
        return -(-extent // (self.ranks * self.align)) * self.ranks * self.align

    @cached_property
    def gaps(self) -> list[tuple[int, int]]:
        """What lies between the tensors and at the end, as ranges."""
        ends = [offset + size for offset, size in zip(self.offsets, self.sizes, strict=True)]
        starts = [*self.offsets[1:], self.length]
        return [(end, start) for end, start in zip(ends, starts, strict=True) if end < start]

    def bounds(self, rank: int) -> tuple[int, int]:
        """Return where a rank's shard begins and ends."""
        each = self.length // self.ranks
        return rank * each, (rank + 1) * each

    def slices(self, rank: int) -> list[Slice]:
        """List what a rank holds, in order. A tensor without elements is rank 0's."""
        begin, end = self.bounds(rank)
        held = []
        for tensor, (offset, size) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            start, stop = max(begin - offset, 0), min(end - offset, size)
            if start < stop:
                held.append(Slice(tensor, start, stop, offset + start - begin))
            elif size == 0 and rank == 0:
                held.append(Slice(tensor, 0, 0, min(offset, end) - begin))
        return held


def runs(slices: Sequence[Slice], kinds: Sequence[object]) -> list[list[Slice]]:
    """Join neighbouring slices whose tensors are of one kind; slices of kind None are left out.

    `kinds` has one of each tensor. What is joined has nothing but gaps between.
    """
    joined: list[list[Slice]] = []
    before: object = None  # the kind of the slice before, None at first
    for each in slices:
        kind = kinds[each.tensor]
        if kind is not None and kind == before:
            joined[-1].append(each)
        elif kind is not None:
            joined.append([each])
        before = kind
    return joined
