"""The measured operations, with the meaning of their numbers and their theoretical cost. This module does not import
torch.

S is the size in a row's name, n the number of ranks. Sizes and bus factors are those of nccl-tests, so that numbers can
be compared: algbw = S / t, busbw = algbw * bus_factor(n); GB/s is 1e9 bytes per second.

    S of an operation                                            `chunked`: S is n equal chunks, one for each rank
    all_reduce, broadcast, reduce   one rank's buffer
    all_gather                      the gathered output          chunked
    reduce_scatter, all_to_all      one rank's whole input       chunked
    gather, scatter                 the root's whole buffer      chunked
    send_recv, ping_pong            one message, one way

`wire(n)` is the number of bytes that all ranks together send with the best algorithm for large S, divided by S.
`buffers(n)` is the number of bytes that one rank (the root, if there is one) allocates, divided by S.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Literal

ALIGNMENT_BYTES: Final = 16  # chunks are rounded down to a multiple of this, as in nccl-tests

Place = Literal["in", "out"]
OfWorld = Callable[[int], float]


@dataclass(frozen=True)
class Operation:
    """The properties of one operation. The code that runs it is in `collectives_bench/ranks/operations.py`."""

    name: str
    phrase: str
    bus_factor: OfWorld
    wire: OfWorld
    buffers: OfWorld
    chunked: bool = False
    reduces: bool = False
    places: tuple[Place, ...] = ("in",)  # "in" if the result overwrites the input, else "out"; default first
    ours: bool = False  # True: Muster's own operation, built from send and recv (`ddp/primitives/`)
    least_ranks: int = 1
    has_size: bool = True


Costs = tuple[OfWorld, OfWorld, OfWorld]  # bus factor, wire, buffers
_ALL: Final[Costs] = (lambda n: 2 * (n - 1) / n, lambda n: 2.0 * (n - 1), lambda n: 1.0)
_CHUNKS: Final[Costs] = (lambda n: (n - 1) / n, lambda n: n - 1.0, lambda n: 1 + 1 / n)
_ROOTED: Final[Costs] = (lambda n: 1.0, lambda n: n - 1.0, lambda n: 1.0)
_ROOTED_CHUNKS: Final[Costs] = (lambda n: (n - 1) / n, lambda n: (n - 1) / n, lambda n: 1 + 1 / n)
_EXCHANGED: Final[Costs] = (lambda n: (n - 1) / n, lambda n: n - 1.0, lambda n: 2.0)
_SHIFTED: Final[Costs] = (lambda n: 1.0, float, lambda n: 2.0)
_TWO_WAYS: Final[Costs] = (lambda n: 1.0, lambda n: 2.0, lambda n: 2.0)
_NOTHING: Final[Costs] = (lambda n: 0.0,) * 3

_chunked = partial(Operation, chunked=True, places=("out",))
_both_places = partial(Operation, chunked=True, places=("out", "in"))
_messages = partial(Operation, places=("out",), least_ranks=2)

LIBRARY: Final[dict[str, Operation]] = {
    each.name: each
    for each in (
        Operation("all_reduce", "every rank gets the sum of all", *_ALL, reduces=True),
        _both_places("all_gather", "every rank gets every rank's chunk", *_CHUNKS),
        _both_places("reduce_scatter", "every rank gets its chunk of the sum", *_CHUNKS, reduces=True),
        Operation("broadcast", "every rank gets rank 0's buffer", *_ROOTED),
        Operation("reduce", "rank 0 gets the sum of all", *_ROOTED, reduces=True),
        _chunked("gather", "rank 0 gets every rank's chunk", *_ROOTED_CHUNKS),
        _chunked("scatter", "every rank gets its chunk of rank 0's buffer", *_ROOTED_CHUNKS),
        _chunked("all_to_all", "every rank sends a different chunk to every rank", *_EXCHANGED),
        _messages("send_recv", "a ring: all ranks send to the next one at the same time", *_SHIFTED),
        _messages("ping_pong", "ranks 0 and 1 send one message back and forth; the time is for one way", *_TWO_WAYS),
        Operation("barrier", "no rank leaves before all have arrived", *_NOTHING, has_size=False),
    )
}


def _ours(name: str, twin: str, phrase: str, **more: Any) -> Operation:
    """Return the entry for Muster's own implementation of a library operation; it supports only the default place."""
    twins = LIBRARY[twin]
    return replace(twins, name=name, phrase=phrase, places=twins.places[:1], ours=True, **more)


# Muster's simple implementations, for comparison with the library's.
OWN: Final = (
    _ours("ring_all_reduce", "all_reduce", "all_reduce as a ring of sends"),
    _ours("ring_reduce_scatter", "reduce_scatter", "reduce_scatter as a ring of sends"),
    _ours("ring_all_gather", "all_gather", "all_gather as a ring of sends"),
    _ours("tree_broadcast", "broadcast", "broadcast in ceil(log2 n) rounds of sends"),
    _ours("tree_reduce", "reduce", "reduce in ceil(log2 n) rounds of sends"),
    _ours("exchange_reduce_scatter", "reduce_scatter", "reduce_scatter as all-to-all and a sum in rank order"),
    _ours(
        "gather_scatter",
        "all_reduce",
        "the mean computed on rank 0: gather, average, scatter",
        buffers=float,
    ),
)
OPERATIONS: Final[dict[str, Operation]] = {**LIBRARY, **{each.name: each for each in OWN}}
DTYPES: Final[dict[str, int]] = {"fp32": 4, "bf16": 2, "fp16": 2, "int32": 4}  # bytes per element


def actual_bytes(operation: Operation, asked: int, ranks: int, dtype: str) -> int:
    """Return the size S for the requested bytes, rounded so that each chunk is a multiple of 16 bytes.

    If the requested size is too small for that, a chunk is one element. An operation without a size has S = 0.
    """
    if not operation.has_size:
        return 0
    chunks, itemsize = (ranks if operation.chunked else 1), DTYPES[dtype]
    unit = ALIGNMENT_BYTES if asked // chunks >= ALIGNMENT_BYTES else itemsize
    return max(asked // chunks // unit * unit, itemsize) * chunks
