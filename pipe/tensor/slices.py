"""The slice of a global tensor that a rank holds, and the positions of its elements in the whole. No torch.

A slice is one range along one dimension. A slice along dimension 0 is also one range of the whole tensor's row-major
elements. A slice along dimension 1 is a range in every row. A part of a slice, as cut by ZeRO, consists of a few boxes,
however many rows it has:

    down (6, 4), this rank columns 2:4         its elements 1 .. 8, flat      in the whole
        0  1                                      .  1                        [0:1, 3:4]
        2  3                                      2  3                        [1:4, 2:4]
        4  5                                      4  5
        6  7                                      6  7
        8  9                                      8  .                        [4:5, 2:3]
       10 11                                      .  .
"""

import math
from dataclasses import dataclass

Range = tuple[int, int]
Box = tuple[Range, ...]


@dataclass(frozen=True)
class TensorSlice:
    """The range [start, stop) of one dimension of a global shape. `dimension` is None for a whole tensor.

    `answers` is True if this rank contributes the slice to a checkpoint or a norm, in which each element must occur
    once. Rank 0 contributes the tensors that are not split.
    """

    name: str
    shape: tuple[int, ...]
    dimension: int | None = None
    start: int = 0
    stop: int = 0
    answers: bool = True

    @property
    def has_first(self) -> bool:
        """True on one rank only, which contributes the first element and also values stored once per tensor."""
        return self.answers and self.start == 0

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the slice."""
        return tuple(stop - start for start, stop in self.box)

    @property
    def box(self) -> Box:
        """The slice as a range of each dimension."""
        whole = [(0, size) for size in self.shape]
        if self.dimension is not None:
            whole[self.dimension] = (self.start, self.stop)
        return tuple(whole)

    @property
    def offset(self) -> int | None:
        """Row-major position of the slice's first element in the whole tensor; None if the slice is not one range."""
        if self.dimension is None:
            return 0
        if math.prod(self.shape[: self.dimension]) > 1:
            return None
        return self.start * math.prod(self.shape[self.dimension + 1 :])

    def boxes(self, begin: int, end: int) -> list[tuple[Range, Box]]:
        """Cut elements [begin, end) of the slice, flattened row by row, into boxes of the global tensor, in order.

        Each box comes with its range of the slice's elements, which are in the box's row-major order.

        Raises:
            ValueError: If the range is not within the slice.
        """
        elements = math.prod(self.local_shape)
        if not 0 <= begin <= end <= elements:
            raise ValueError(f"{self.name}: elements {begin}:{end} are not within this rank's 0:{elements}")
        found, at = [], begin
        for local in _boxes(self.local_shape, begin, end):
            size = math.prod(high - low for low, high in local)
            found.append(((at, at + size), self._in_whole(local)))
            at += size
        return found

    def _in_whole(self, local: Box) -> Box:
        if self.dimension is None:
            return local
        low, high = local[self.dimension]
        moved = (low + self.start, high + self.start)
        return (*local[: self.dimension], moved, *local[self.dimension + 1 :])


def _boxes(shape: tuple[int, ...], begin: int, end: int) -> list[Box]:
    """Cut elements [begin, end) of a tensor, in row-major order, into boxes: parts of rows, and blocks of rows."""
    if begin == end:
        return []
    if not shape:
        return [()]
    row = math.prod(shape[1:])
    rest = tuple((0, size) for size in shape[1:])
    first, last = begin // row, (end - 1) // row
    if first == last and end - begin < row:
        return [((first, first + 1), *box) for box in _boxes(shape[1:], begin - first * row, end - first * row)]
    found: list[Box] = []
    if begin % row:
        found += [((first, first + 1), *box) for box in _boxes(shape[1:], begin % row, row)]
        first += 1
    if first < end // row:
        found.append(((first, end // row), *rest))
    if end % row:
        found += [((last, last + 1), *box) for box in _boxes(shape[1:], 0, end % row)]
    return found
