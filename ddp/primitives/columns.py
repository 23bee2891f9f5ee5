"""Long tensors in short messages, several under way at once, without holding more than some MB beside them.

A *column* is the same short slice of every chunk. What a primitive does with one is a generator that stops wherever
messages are under way; columns take turns, so that while one's message travels another's is added.

    messages   a0 b0 c0 a1 b1 c1 ...       three columns a, b, c at a time, step 0, step 1, ...
    sums          a0 b0 c0 a1 b1 c1 ...
"""

from collections.abc import Generator, Iterable, Iterator
from itertools import islice
from typing import Final, TypeAlias

from torch import Tensor

Column: TypeAlias = Generator[None, None, None]

# Bytes of a message: shorter ones are not worth cutting, longer ones are cut. What gloo brings is added while it is in
# the cache; to NCCL a message costs about what 16 MB of NVLink do.
SEGMENT_BYTES: Final = {"cpu": (2**17, 2**22), "cuda": (2**24, 2**26)}
UNDER_WAY: Final = 2  # columns at a time: one travels while the other is added; more would share the link unfairly


def interleave(columns: Iterable[Column]) -> None:
    """Run columns in turns until all have ended: in the same order on every rank, so that messages match."""
    waiting = iter(columns)
    under_way = [column for column in islice(waiting, UNDER_WAY) if _goes_on(column)]
    while under_way:
        column = under_way.pop(0)
        if _goes_on(column):
            under_way.append(column)
        else:
            under_way += [new for new in islice(waiting, 1) if _goes_on(new)]


def _goes_on(column: Column) -> bool:
    """Run a column to its next message; False when it has ended."""
    return next(column, True) is None


def columns_of(parts: list[Tensor], share: int = 1) -> Iterator[tuple[list[Tensor], slice]]:
    """Cut chunks into columns of like length; give each with the slice of a chunk that it is.

    `share` is how many messages of a column are held at a time.
    """
    longest, like = max(part.numel() for part in parts), parts[0]
    least, _ = SEGMENT_BYTES[like.device.type]
    worth = min(UNDER_WAY, longest * like.element_size() // least)  # two at least, if they are worth sending alone
    pieces = max(-(-longest // longest_message(like, share)), worth, 1)
    for where in slices(longest, max(-(-longest // pieces), 1)):
        yield [part[where] for part in parts], where


def segments_of(tensor: Tensor) -> Iterator[Tensor]:
    """Cut a tensor into short ones."""
    return (column[0] for column, _ in columns_of([tensor]))


def slices(count: int, step: int) -> Iterator[slice]:
    """Cut `count` places into slices of `step`."""
    return (slice(first, first + step) for first in range(0, count, step))


def longest_message(like: Tensor, share: int = 1) -> int:
    """Return how many elements a message may have, where `share` of them are held at a time."""
    least, most = SEGMENT_BYTES[like.device.type]
    return max(most // share, least) // like.element_size()
