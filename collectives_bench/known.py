"""The number of bytes that gloo (torch 2.13) sends according to its source code, for operations that exceed the
optimum. Pure.

`known_wire` returns the payload bytes that all ranks together send in one call. `deviation` describes how counted bytes
differ from the optimum.
"""

from collections.abc import Callable
from typing import Final

from muster.collectives_bench.catalog import DTYPES, OPERATIONS
from muster.collectives_bench.records import BenchCell, WireBytes

SEGMENT: Final = 2**20  # gloo/reduce.h, gloo/allreduce.h: kMaxSegmentSize
LEAST_JUDGED: Final = 2**20  # calls with fewer bytes are not compared
WHY: Final = {
    "reduce_scatter": ": it is implemented as an all_reduce of all data",
    "reduce": ": every rank sends nearly all segments around the ring",
}


def best_wire(cell: BenchCell, nbytes: int, ranks: int) -> float:
    """Return the bytes that the best algorithm sends."""
    return OPERATIONS[cell.operation].wire(ranks) * nbytes


def known_wire(cell: BenchCell, nbytes: int, ranks: int, *, backend: str = "gloo") -> float:
    """Return the bytes that the library's algorithm sends; if it is unknown, return those of the best algorithm."""
    known = GLOO.get(cell.operation) if backend == "gloo" else None
    return known(nbytes, ranks, DTYPES[cell.dtype]) if known is not None else best_wire(cell, nbytes, ranks)


def deviation(operation: str, wire: WireBytes, *, within: float = 0.01) -> str:
    """Describe how the bytes of an operation differ from those of the best or the known algorithm; "" if they do not.

    Calls of less than 1 MB are not compared, because the library's own headers (some tens of bytes per message) matter.
    """
    if wire.best_bytes < LEAST_JUDGED or abs(wire.sent_bytes - wire.best_bytes) <= within * wire.best_bytes:
        return ""
    ratio = wire.sent_bytes / wire.best_bytes
    text = f"{operation} moves {ratio:.2f} x the best algorithm's bytes"
    if abs(wire.sent_bytes - wire.known_bytes) <= within * wire.known_bytes:
        return f"{text}, as its source code predicts{WHY.get(operation, '')}"
    return f"{text}; {wire.known_bytes / wire.best_bytes:.2f} x was expected"


def _reduce(nbytes: int, ranks: int, itemsize: int) -> float:
    """Count a ring in which every rank sends all but two of its segments, then a gather of chunks (gloo/reduce.cc).

    n - 1 transfers of a chunk would be enough, as in allreduce.cc.
    """
    if ranks == 1 or not nbytes:
        return 0.0
    largest = itemsize * max(1, SEGMENT // itemsize)
    segment = _up(min(-(-nbytes // (ranks * 2)), largest), itemsize)
    segments = _up(max(-(-nbytes // segment), ranks * 2), ranks)
    each = segments // ranks
    ring = ranks * nbytes
    for rank in range(ranks):
        for last in (segments - 2, segments - 1):
            index = ((rank + 1) * each + last) % segments
            ring -= _clipped(index * segment, segment, nbytes)
    return ring + nbytes - _clipped(0, each * segment, nbytes)  # the root keeps the first chunk


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _clipped(offset: int, length: int, total: int) -> int:
    """Return how many of the `length` bytes from `offset` lie within the buffer."""
    return max(0, min(length, total - offset))


GLOO: Final[dict[str, Callable[[int, int, int], float]]] = {
    # gloo all-reduces a clone of the whole buffer, then copies the rank's own chunk (ProcessGroupGloo.cpp).
    "reduce_scatter": lambda nbytes, ranks, itemsize: OPERATIONS["all_reduce"].wire(ranks) * nbytes,
    "reduce": _reduce,
}
