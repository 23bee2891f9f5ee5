"""Rings: rank r receives from r - 1 and sends to r + 1, so that all links are always busy."""

import torch
from torch import Tensor

from muster.ddp.primitives.columns import Column, columns_of, interleave
from muster.ddp.primitives.peers import Chunks, Group, Peers, chunks_of, copy, parts_of


def ring_reduce_scatter(chunks: Chunks, out: Tensor, group: Group = None) -> None:
    """Store in `out` the sum over ranks of this rank's chunk, in n - 1 steps of a ring.

    The chunks do not change; `out` may be this rank's own chunk. Chunk c is added in the rank order
    c + 1, c + 2, ... n - 1, 0, ... c.

    Raises:
        ValueError: If lengths, shapes, dtypes or devices do not fit together, or this rank is not in the group.
    """
    ring = Peers(group)
    parts = ring.check(parts_of(chunks, ring.size), "chunks")
    ring.check_one(out, parts[ring.rank], "out", f"chunk {ring.rank}")
    interleave(_reduce_column(ring, column, out[where]) for column, where in columns_of(parts))


def ring_all_gather(chunk: Tensor, out: Chunks, group: Group = None) -> None:
    """Gather every rank's chunk into `out`, in n - 1 steps of a ring. `chunk` may be this rank's entry in `out`.

    Raises:
        ValueError: If lengths, shapes, dtypes or devices do not fit together, or this rank is not in the group.
    """
    ring = Peers(group)
    parts = ring.check(parts_of(out, ring.size), "out")
    ring.check_one(chunk, parts[ring.rank], "chunk", f"entry {ring.rank} of out")
    copy(chunk, parts[ring.rank])
    interleave(_gather_column(ring, column) for column, _ in columns_of(parts))


def ring_all_reduce(tensor: Tensor, group: Group = None) -> None:
    """Replace a tensor by its sum over ranks. Every column runs a reduce-scatter, then an all-gather.

    All ranks get the same bits.

    Raises:
        ValueError: If the tensor is not flat and contiguous, or this rank is not in the group.
    """
    ring = Peers(group)
    parts = ring.check(chunks_of(tensor, ring.size), "tensor")

    def both(column: list[Tensor]) -> Column:
        yield from _reduce_column(ring, column, column[ring.rank])
        yield from _gather_column(ring, column)

    interleave(both(column) for column, _ in columns_of(parts))


def _reduce_column(ring: Peers, column: list[Tensor], out: Tensor) -> Column:
    """Reduce-scatter a column: add the previous rank's partial sum to this rank's part; send it to the next rank."""
    rank, size = ring.rank, ring.size
    if size == 1:
        copy(column[0], out)
        return
    longest = max(part.numel() for part in column)
    buffers = [out.new_empty(longest), out.new_empty(longest)]  # two buffers: one is sent while the other is filled
    sending = column[(rank - 1) % size]
    for step in range(size - 1):
        own = column[(rank - 2 - step) % size]  # in the last step (size - 2), this is the rank's own part
        received = buffers[step % 2][: own.numel()]
        works = ring.post(sends=[(sending, rank + 1)], receives=[(received, rank - 1)])
        yield
        ring.wait(works)
        sending = torch.add(received, own, out=received if step < size - 2 else out)


def _gather_column(ring: Peers, column: list[Tensor]) -> Column:
    """All-gather a column: in each step, send the last received part to the next rank."""
    rank, size = ring.rank, ring.size
    for step in range(size - 1):
        sending, receiving = column[(rank - step) % size], column[(rank - step - 1) % size]
        works = ring.post(sends=[(sending, rank + 1)], receives=[(receiving, rank - 1)])
        yield
        ring.wait(works)
