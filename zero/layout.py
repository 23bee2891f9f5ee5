"""Layout of tensors packed into one flat tensor, and its shards: a pure function of sizes and number of ranks.

tensors    | a a a a a a a | b b b | c c c c c c | pad
rank 0       a a a a a                                     shards have equal lengths, whatever the tensors are:
rank 1                 a a   b b b                         a rank has slices of some tensors
rank 2                               c c c c c
rank 3                                         c   . .
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate


@dataclass(frozen=True)
class Slice:
    """Elements [start, stop) of one tensor, at `offset` in the shard that contains them."""

    tensor: int
    start: int
    stop: int
    offset: int

    @property
    def elements(self) -> int:
        """Number of elements."""
        return self.stop - self.start


@dataclass(frozen=True)
class Layout:
    """Tensors of `sizes` elements, packed at multiples of `align` elements and cut into `ranks` shards."""

    sizes: tuple[int, ...]
    ranks: int
    align: int = 1

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Offset of each tensor."""
        return (0, *accumulate(-(-size // self.align) * self.align for size in self.sizes))[:-1]

    @cached_property
    def length(self) -> int:
        """Elements of the flat tensor, including gaps between tensors and padding at the end."""
        extent = self.offsets[-1] + self.sizes[-1] if self.sizes else 0
        return -(-extent // (self.ranks * self.align)) * self.ranks * self.align

    @cached_property
    def gaps(self) -> list[tuple[int, int]]:
        """The unused ranges between the tensors and at the end."""
        ends = [offset + size for offset, size in zip(self.offsets, self.sizes, strict=True)]
        starts = [*self.offsets[1:], self.length]
        return [(end, start) for end, start in zip(ends, starts, strict=True) if end < start]

    def bounds(self, rank: int) -> tuple[int, int]:
        """Return the start and end of a rank's shard."""
        each = self.length // self.ranks
        return rank * each, (rank + 1) * each

    def slices(self, rank: int) -> list[Slice]:
        """List the slices in a rank's shard, in order. Tensors without elements belong to rank 0."""
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
    """Group adjacent slices whose tensors have the same kind. Slices of kind None are omitted.

    `kinds` has one entry per tensor. Between the slices of a group there are only gaps.
    """
    joined: list[list[Slice]] = []
    before: object = None  # the kind of the previous slice
    for each in slices:
        kind = kinds[each.tensor]
        if kind is not None and kind == before:
            joined[-1].append(each)
        elif kind is not None:
            joined.append([each])
        before = kind
    return joined
