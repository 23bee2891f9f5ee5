"""Exchanges: in round i rank r sends to r + i and receives from r - i; and sums in the order of ranks from them."""

import torch
from torch import Tensor

from ddp.primitives.columns import Column, columns_of, interleave
from ddp.primitives.peers import Chunks, Group, Peers, chunks_of, copy, parts_of, wait
from ddp.primitives.rings import ring_all_gather


def exchange(inputs: Chunks, outputs: Chunks, group: Group = None) -> None:
    """Send `inputs[j]` to rank j and receive `outputs[j]` from it, for every j: all-to-all, in n - 1 rounds of pairs.

    `inputs[j]` must be as long here as `outputs` of this rank's place are on rank j; else lengths are free.

    Raises:
        ValueError: the tensors do not fit together, or this rank is not in the group.
    """
    peers = Peers(group)
    sending = peers.check(parts_of(inputs, peers.size), "inputs")
    receiving = peers.check(parts_of(outputs, peers.size), "outputs")
    peers.check_one(sending[peers.rank], receiving[peers.rank], f"input {peers.rank}", f"output {peers.rank}")
    interleave(_pair_round(peers, sending, receiving, distance) for distance in range(1, peers.size))
    copy(sending[peers.rank], receiving[peers.rank])


def ordered_reduce_scatter(chunks: Chunks, out: Tensor, group: Group = None) -> None:
    """Put into `out` the sum over ranks of this rank's chunk, taken in the order of ranks.

    As many bytes as a ring sends, but each rank hears of all others and adds what they have as one process would:
    ((x0 + x1) + x2) + ..., the same bits. The chunks are left as they were; `out` may be this rank's own chunk.

    Raises:
        ValueError: the tensors do not fit together, or this rank is not in the group.
    """
    peers = Peers(group)
    parts = peers.check(parts_of(chunks, peers.size), "chunks")
    peers.check_one(out, parts[peers.rank], "out", f"chunk {peers.rank}")
    # n - 1 messages are held of every column
    columns = columns_of(parts, share=max(1, peers.size - 1))
    interleave((_ordered_column(peers, column, out[where]) for column, where in columns), 2)


def ordered_all_reduce(tensor: Tensor, group: Group = None) -> None:
    """Replace a tensor by its sum over ranks, taken in the order of ranks: the bits of one process.

    Raises:
        ValueError: the tensor is not flat and contiguous, or this rank is not in the group.
    """
    peers = Peers(group)
    parts = peers.check(chunks_of(tensor, peers.size), "tensor")
    ordered_reduce_scatter(parts, parts[peers.rank], group)
    ring_all_gather(parts[peers.rank], parts, group)


def _ordered_column(peers: Peers, column: list[Tensor], out: Tensor) -> Column:
    """Send everybody its part of a column, receive this rank's from all, and add in the order of ranks."""
    rank, size = peers.rank, peers.size
    own = column[rank]
    parts = [own if other == rank else torch.empty_like(own) for other in range(size)]
    others = range(1, size)
    works = peers.post(
        sends=[(column[(rank + distance) % size], rank + distance) for distance in others],
        receives=[(parts[(rank - distance) % size], rank - distance) for distance in others],
    )
    yield
    wait(works)
    total = parts[0]
    for other, part in enumerate(parts[1:], start=1):
        # `own` is only read, for it may be a caller's: of two neighbours one at least was received
        total = torch.add(total, part, out=out if other == size - 1 else part if total is own else total)
    if size == 1:
        copy(own, out)


def _pair_round(peers: Peers, sending: list[Tensor], receiving: list[Tensor], distance: int) -> Column:
    to, source = (peers.rank + distance) % peers.size, (peers.rank - distance) % peers.size
    works = peers.post(sends=[(sending[to], to)], receives=[(receiving[source], source)])
    yield
    wait(works)
