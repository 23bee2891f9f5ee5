"""A piece: a part of one logical tensor, independent of ranks.

A tensor has a name, a dtype and a global shape. A piece is a box (a range per dimension: tensor parallel, pipeline) or
a flat range of row-major elements (ZeRO). Savers and loaders list their own pieces. `runs()` converts both kinds to a
common form: ascending ranges of row-major elements.

Names are `model/<name>` for parameters and buffers, `optimizer/<name>/<key>` for optimizer state, with global layer
numbers. Dtypes have their safetensors names.
"""

import bisect
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Final

Range = tuple[int, int]

ITEM_BYTES: Final = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "C64": 8,
    "F64": 8,
    "I64": 8,
    "U64": 8,
}
MAX_NAME: Final = 1024
MAX_DIMENSIONS: Final = 32
MAX_ELEMENTS: Final = 2**52  # keeps sizes in bytes far below 2**64


@dataclass(frozen=True)
class Piece:
    """A part of one tensor: a `box` of [start, stop) per dimension, a `flat` range of row-major elements, or all of it.

    Raises:
        ValueError: if the name, dtype, shape or range is invalid; the message says which.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    box: tuple[Range, ...] | None = None
    flat: Range | None = None

    def __post_init__(self) -> None:
        _check_tensor(self.name, self.dtype, self.shape)
        if self.box is not None and self.flat is not None:
            raise ValueError(f"{self.name}: a piece must be a box or a flat range, got both")
        if self.box is not None:
            if len(self.box) != len(self.shape):
                raise ValueError(
                    f"{self.name}: a box has {len(self.box)} ranges, but the shape {len(self.shape)} dimensions"
                )
            for each, size in zip(self.box, self.shape, strict=True):
                _check_range(self.name, each, size)
        if self.flat is not None:
            _check_range(self.name, self.flat, self.tensor_elements)

    @cached_property
    def tensor_elements(self) -> int:
        """The number of elements of the whole tensor."""
        return math.prod(self.shape)

    @cached_property
    def extent(self) -> tuple[int, ...]:
        """The shape of the piece; one dimension for a flat range."""
        if self.flat is not None:
            return (self.flat[1] - self.flat[0],)
        return self.shape if self.box is None else tuple(stop - start for start, stop in self.box)

    @cached_property
    def elements(self) -> int:
        """The number of elements of the piece."""
        return math.prod(self.extent)

    @property
    def item_bytes(self) -> int:
        """The bytes of one element."""
        return ITEM_BYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        """The bytes of the piece."""
        return self.elements * self.item_bytes

    @property
    def is_whole(self) -> bool:
        """True if the piece covers the whole tensor, in its own shape."""
        return self.flat is None and self.extent == self.shape

    @property
    def key(self) -> str:
        """The name in a shard: the name of the tensor, followed by the range if the piece is not whole."""
        if self.is_whole:
            return self.name
        if self.flat is not None:
            return f"{self.name}[flat {self.flat[0]}:{self.flat[1]}]"
        return f"{self.name}[{','.join(f'{start}:{stop}' for start, stop in self.box or ())}]"

    def runs(self) -> "Runs":
        """Return the piece as ascending ranges of the tensor's row-major elements, in the order of the piece."""
        if self.elements == 0:
            return Runs(0, 0, ())
        if self.flat is not None:
            return Runs(self.flat[0], self.elements, ())
        box = self.box if self.box is not None else tuple((0, size) for size in self.shape)
        # Trailing dimensions that the box covers fully form one run, together with the dimension before them.
        inner, first = 1, len(box)
        while first > 0 and inner == math.prod(self.shape[first:]):
            first -= 1
            inner *= box[first][1] - box[first][0]
        start, stride, outer = 0, self.tensor_elements, []
        for dimension, ((begin, end), size) in enumerate(zip(box, self.shape, strict=True)):
            stride //= size
            start += begin * stride
            if dimension < first:
                outer.append((end - begin, stride))
        return Runs(start, inner, tuple(outer))


def whole(name: str, dtype: str, shape: tuple[int, ...]) -> Piece:
    """Return the piece that covers a whole tensor."""
    return Piece(name, dtype, tuple(shape))


@dataclass(frozen=True)
class Runs:
    """Ascending ranges of equal length, computed on demand, because a column of a huge matrix has one range per row."""

    start: int
    length: int
    outer: tuple[tuple[int, int], ...]  # (count, stride in elements) of each dimension outside a run, outermost first

    @cached_property
    def count(self) -> int:
        """The number of ranges."""
        return math.prod(count for count, _ in self.outer) if self.length else 0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Range:
        if not 0 <= index < self.count:
            raise IndexError(index)
        start = self.start
        for count, stride in reversed(self.outer):
            index, at = divmod(index, count)
            start += at * stride
        return start, start + self.length

    def __iter__(self) -> Iterator[Range]:
        if not self.count:
            return
        for offsets in itertools.product(*(range(0, count * stride, stride) for count, stride in self.outer)):
            start = self.start + sum(offsets)
            yield start, start + self.length

    def first_after(self, element: int, begin: int = 0) -> int:
        """Return the index of the first run, from `begin` on, that contains `element` or starts after it."""
        if begin < self.count and self[begin][1] > element:
            return begin  # the usual case, because pieces are read in order
        return bisect.bisect_right(range(self.count), element, begin, key=lambda index: self[index][1])


def _check_tensor(name: object, dtype: object, shape: tuple[object, ...]) -> None:
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or not name.isprintable() or name == "__metadata__":
        raise ValueError(f"a tensor's name must be 1 to {MAX_NAME} printable characters, got {name!r:.80}")
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise ValueError(f"{name}: unknown dtype {dtype!r:.40}; known: {', '.join(ITEM_BYTES)}")
    if not isinstance(shape, tuple) or len(shape) > MAX_DIMENSIONS:
        raise ValueError(f"{name}: a shape must have at most {MAX_DIMENSIONS} dimensions")
    elements = 1
    for size in shape:
        if type(size) is not int or not 0 <= size <= MAX_ELEMENTS:
            raise ValueError(f"{name}: a dimension must be a whole number from 0 to {MAX_ELEMENTS}, got {size!r:.40}")
        elements *= max(size, 1)
        if elements > MAX_ELEMENTS:
            raise ValueError(f"{name}: more than {MAX_ELEMENTS} elements")


def _check_range(name: str, given: object, size: int) -> None:
    if not isinstance(given, tuple) or len(given) != 2 or any(type(each) is not int for each in given):
        raise ValueError(f"{name}: a range must be two whole numbers, got {given!r:.60}")
    if not 0 <= given[0] <= given[1] <= size:
        raise ValueError(f"{name}: the range {given[0]}:{given[1]} does not lie in 0:{size}")
