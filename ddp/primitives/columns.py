"""Send long tensors as short messages, a few at a time, with only a few MB of extra memory.

A *column* consists of the same short slice of every chunk. A primitive processes a column in a generator, which yields
while its messages are in transit. Columns take turns, so that a message of one column is sent while another column is
summed.

    messages   a0 b0 c0 a1 b1 c1 ...       three columns a, b, c at a time, step 0, step 1, ...
    sums          a0 b0 c0 a1 b1 c1 ...
"""

from collections.abc import Generator, Iterable, Iterator
from itertools import islice
from typing import Final, TypeAlias

from torch import Tensor

Column: TypeAlias = Generator[None, None, None]

# The smallest and largest message, in bytes. Tensors are not cut into messages smaller than the minimum, and no message
# is larger than the maximum. With gloo, messages are so short that they stay in the CPU's cache until they are added.
# With NCCL, the fixed cost of a message equals the time for about 16 MB over NVLink.
SEGMENT_BYTES: Final = {"cpu": (2**17, 2**22), "cuda": (2**24, 2**26)}
UNDER_WAY: Final = 2  # columns in progress: one is sent while the other is summed; more would share the link unfairly


def interleave(columns: Iterable[Column]) -> None:
    """Run columns in turns until all have ended. The order is the same on every rank, so that messages match."""
    waiting = iter(columns)
    under_way = [column for column in islice(waiting, UNDER_WAY) if _goes_on(column)]
    while under_way:
        column = under_way.pop(0)
        if _goes_on(column):
            under_way.append(column)
        else:
            under_way += [new for new in islice(waiting, 1) if _goes_on(new)]


def _goes_on(column: Column) -> bool:
    """Run a column up to its next message; return False if it has ended."""
    return next(column, True) is None


def columns_of(parts: list[Tensor], share: int = 1) -> Iterator[tuple[list[Tensor], slice]]:
    """Cut chunks into columns of similar length; yield each with its slice of a chunk.

    `share` is the number of messages per column that are in memory at the same time.
    """
    longest, like = max(part.numel() for part in parts), parts[0]
    least, _ = SEGMENT_BYTES[like.device.type]
    worth = min(UNDER_WAY, longest * like.element_size() // least)  # at least two pieces if the tensor is long enough
    pieces = max(-(-longest // longest_message(like, share)), worth, 1)
    for where in slices(longest, max(-(-longest // pieces), 1)):
        yield [part[where] for part in parts], where


def segments_of(tensor: Tensor) -> Iterator[Tensor]:
    """Cut a tensor into short segments."""
    return (column[0] for column, _ in columns_of([tensor]))


def slices(count: int, step: int) -> Iterator[slice]:
    """Divide `count` positions into slices of length `step`."""
    return (slice(first, first + step) for first in range(0, count, step))


def longest_message(like: Tensor, share: int = 1) -> int:
    """Return the largest number of elements in a message if `share` messages are in memory at the same time."""
    least, most = SEGMENT_BYTES[like.device.type]
    return max(most // share, least) // like.element_size()
