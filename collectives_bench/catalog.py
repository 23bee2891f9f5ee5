"""The operations that are measured, torch-free: what their numbers mean, and what they cost at best.

S is the size that a row names, n the number of ranks. Sizes and bus factors are those of nccl-tests, so that numbers
compare: algbw = S / t, busbw = algbw * bus_factor(n), GB/s is 1e9 bytes a second.

    S of an operation                                            `chunked`: S is n equal chunks, one for each rank
    all_reduce, broadcast, reduce   one rank's buffer
    all_gather                      the gathered output          chunked
    reduce_scatter, all_to_all      one rank's whole input       chunked
    gather, scatter                 all that the root holds      chunked
    send_recv, ping_pong            one message, one way

`wire(n)` is what all ranks together send, divided by S, by the best algorithm for large S; `buffers(n)` what one rank
(the root, where there is one) allocates for it, divided by S.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

ALIGNMENT_BYTES: Final = 16  # nccl-tests rounds every rank's chunk down to it; the row names the size that was used

Place = Literal["in", "out"]
OfWorld = Callable[[int], float]


@dataclass(frozen=True)
class Operation:
    """One row: an operation's meaning, without the code that runs it (`collectives_bench/ranks/operations.py`)."""

    name: str
    phrase: str
    bus_factor: OfWorld
    wire: OfWorld
    buffers: OfWorld
    chunked: bool = False
    reduces: bool = False
    places: tuple[Place, ...] = ("in",)  # whether the result overwrites the input; the first is the default
    ours: bool = False  # built from send and recv by `ddp/primitives.py`
    least_ranks: int = 1
    has_size: bool = True


def _one(n: int) -> float:
    return 1.0


def _share(n: int) -> float:
    return (n - 1) / n


def _ring(n: int) -> float:
    return 2 * (n - 1) / n


def _others(n: int) -> float:
    return n - 1.0


def _both_ways(n: int) -> float:
    return 2.0 * (n - 1)


def _all(n: int) -> float:
    return float(n)


def _and_chunk(n: int) -> float:
    return 1 + 1 / n


def _two(n: int) -> float:
    return 2.0


def _nothing(n: int) -> float:
    return 0.0


OPERATIONS: Final[dict[str, Operation]] = {
    each.name: each
    for each in (
        Operation("all_reduce", "every rank gets the sum of all", _ring, _both_ways, _one, reduces=True),
        Operation(
            "all_gather",
            "every rank gets every rank's chunk",
            _share,
            _others,
            _and_chunk,
            chunked=True,
            places=("out", "in"),
        ),
        Operation(
            "reduce_scatter",
            "every rank gets its chunk of the sum",
            _share,
            _others,
            _and_chunk,
            chunked=True,
            reduces=True,
            places=("out", "in"),
        ),
        Operation("broadcast", "every rank gets rank 0's buffer", _one, _others, _one),
        Operation("reduce", "rank 0 gets the sum of all", _one, _others, _one, reduces=True),
        Operation(
            "gather", "rank 0 gets every rank's chunk", _share, _share, _and_chunk, chunked=True, places=("out",)
        ),
        Operation(
            "scatter",
            "every rank gets its chunk of rank 0's",
            _share,
            _share,
            _and_chunk,
            chunked=True,
            places=("out",),
        ),
        Operation(
            "all_to_all",
            "every rank sends every rank another chunk",
            _share,
            _others,
            _two,
            chunked=True,
            places=("out",),
        ),
        Operation(
            "send_recv",
            "a ring: every rank sends to the next, all at once",
            _one,
            _all,
            _two,
            places=("out",),
            least_ranks=2,
        ),
        Operation(
            "ping_pong",
            "ranks 0 and 1 send one message to and fro; the time is one way",
            _one,
            _two,
            _two,
            places=("out",),
            least_ranks=2,
        ),
        Operation("barrier", "nobody leaves before all have come", _nothing, _nothing, _nothing, has_size=False),
        # What a learner would write, so that the library's own can be seen to be faster, or not.
        Operation("ring_all_reduce", "all_reduce as a ring of sends", _ring, _both_ways, _one, reduces=True, ours=True),
        Operation(
            "ring_reduce_scatter",
            "reduce_scatter as a ring of sends",
            _share,
            _others,
            _and_chunk,
            chunked=True,
            reduces=True,
            places=("out",),
            ours=True,
        ),
        Operation(
            "ring_all_gather",
            "all_gather as a ring of sends",
            _share,
            _others,
            _and_chunk,
            chunked=True,
            places=("out",),
            ours=True,
        ),
        Operation("tree_broadcast", "broadcast in ceil(log2 n) rounds of sends", _one, _others, _one, ours=True),
        Operation(
            "tree_reduce",
            "reduce in ceil(log2 n) rounds of sends",
            _one,
            _others,
            _one,
            reduces=True,
            ours=True,
        ),
        Operation(
            "exchange_reduce_scatter",
            "reduce_scatter as all-to-all and a sum in rank order",
            _share,
            _others,
            _and_chunk,
            chunked=True,
            reduces=True,
            places=("out",),
            ours=True,
        ),
        Operation(
            "gather_scatter",
            "the mean by way of rank 0, as gradients are averaged first in a course",
            _ring,
            _both_ways,
            _all,
            reduces=True,
            ours=True,
        ),
    )
}

DTYPES: Final[dict[str, int]] = {"fp32": 4, "bf16": 2, "fp16": 2, "int32": 4}  # bytes an element


def actual_bytes(operation: Operation, asked: int, ranks: int, dtype: str) -> int:
    """Return S as it can be had: chunks are whole multiples of 16 bytes, or one element where S is smaller than that.

    `asked` is in bytes. An operation without a size has 0.
    """
    if not operation.has_size:
        return 0
    chunks, itemsize = (ranks if operation.chunked else 1), DTYPES[dtype]
    unit = ALIGNMENT_BYTES if asked // chunks >= ALIGNMENT_BYTES else itemsize
    return max(asked // chunks // unit * unit, itemsize) * chunks
