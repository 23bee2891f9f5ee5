"""Divide a data set at random into parts of given sizes, in the same way in every process. Torch-free."""

import random
from collections.abc import Sequence
from typing import Any, Final

SIZES: Final = (0.7, 0.2, 0.1)
ROUNDING: Final = 1e-9  # tolerated rounding error of a sum of sizes


class Partition:
    """A part of a data set, for `torch.utils.data.DataLoader`: item i is item `indices[i]` of the data."""

    def __init__(self, data: Any, indices: Sequence[int]) -> None:
        self.data = data
        self.indices = indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Any:
        """Return one item."""
        return self.data[self.indices[index]]


class DataPartitioner:
    """Parts of a data set that do not overlap. Rank i trains on `DataPartitioner(data, [1 / ranks] * ranks).use(i)`."""

    def __init__(self, data: Any, sizes: Sequence[float] = SIZES, seed: int = 1234) -> None:
        """Shuffle the indices of `data`, and cut them into parts, each with its share of the samples in `sizes`.

        Raises:
            ValueError: in the same cases as `partitions`.
        """
        self.data = data
        self.partitions = partitions(len(data), sizes, seed)

    def use(self, partition: int) -> Partition:
        """Return one part. Parts are counted from 0."""
        return Partition(self.data, self.partitions[partition])


def partitions(samples: int, sizes: Sequence[float], seed: int) -> list[list[int]]:
    """Return the indices of each part: shuffle `range(samples)` with `seed`, and cut it at sizes that are rounded down.

    If the sizes add up to 1, the last part also has the remaining samples.

    Raises:
        ValueError: if a size is not positive, or the sizes add up to more than 1.
    """
    if not sizes or min(sizes) <= 0 or sum(sizes) > 1 + ROUNDING:
        raise ValueError(f"sizes must be positive shares that add up to at most 1, got {list(sizes)}")
    order = list(range(samples))
    random.Random(seed).shuffle(order)
    lengths = [int(size * samples + ROUNDING) for size in sizes]
    if sum(sizes) > 1 - ROUNDING:
        lengths[-1] = samples - sum(lengths[:-1])
    starts = [sum(lengths[:number]) for number in range(len(lengths))]
    return [order[start : start + length] for start, length in zip(starts, lengths, strict=True)]
