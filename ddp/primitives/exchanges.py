"""Exchanges (in round i rank r sends to r + i and receives from r - i), and sums in rank order built on them."""

from typing import Final

import torch
from torch import Tensor

from muster.ddp.primitives.columns import Column, columns_of, interleave, longest_message, slices
from muster.ddp.primitives.peers import Chunks, Group, Peers, chunks_of, copy, parts_of
from muster.ddp.primitives.rings import ring_all_gather

AT_ONCE: Final = 3  # peers per round: with one peer, a link idles while the peer is late; with many, packets are lost


def exchange(inputs: Chunks, outputs: Chunks, group: Group = None) -> None:
    """Send `inputs[j]` to rank j and receive `outputs[j]` from it, for every j: an all-to-all in rounds.

    In round i, rank r exchanges a segment with the ranks at distance i. On CPUs, `AT_ONCE` rounds run at the same time.

    `inputs[j]` must be as long as this rank's entry in `outputs` on rank j. Apart from that, lengths may differ.

    Raises:
        ValueError: If lengths, shapes, dtypes or devices do not fit together, or this rank is not in the group.
    """
    peers = Peers(group)
    sending = peers.check(parts_of(inputs, peers.size), "inputs")
    receiving = peers.check(parts_of(outputs, peers.size), "outputs")
    peers.check_one(sending[peers.rank], receiving[peers.rank], f"input {peers.rank}", f"output {peers.rank}")
    longest = max(part.numel() for part in (*sending, *receiving))
    # Lengths may differ between ranks, so messages are cut at fixed positions. NCCL sends all messages at once.
    step = longest if sending[0].is_cuda else longest_message(sending[0], AT_ONCE)
    interleave(
        _pairs_column(peers, [part[where] for part in sending], [part[where] for part in receiving])
        for where in slices(longest, max(step, 1))
    )
    copy(sending[peers.rank], receiving[peers.rank])


def ordered_reduce_scatter(chunks: Chunks, out: Tensor, group: Group = None) -> None:
    """Store in `out` the sum over ranks of this rank's chunk, in the order of ranks.

    Each rank receives from all others and adds ((x0 + x1) + x2) + ..., so the sum is bitwise identical to that of one
    process. This sends as many bytes as a ring. The chunks do not change; `out` may be this rank's own chunk.

    Raises:
        ValueError: If lengths, shapes, dtypes or devices do not fit together, or this rank is not in the group.
    """
    peers = Peers(group)
    parts = peers.check(parts_of(chunks, peers.size), "chunks")
    peers.check_one(out, parts[peers.rank], "out", f"chunk {peers.rank}")
    columns = columns_of(parts, share=max(1, peers.size - 1))  # messages in memory per column
    interleave(_ordered_column(peers, column, out[where]) for column, where in columns)


def ordered_all_reduce(tensor: Tensor, group: Group = None) -> None:
    """Replace a tensor by its sum over ranks, added in rank order and bitwise identical to that of one process.

    Raises:
        ValueError: If the tensor is not flat and contiguous, or this rank is not in the group.
    """
    peers = Peers(group)
    parts = peers.check(chunks_of(tensor, peers.size), "tensor")
    ordered_reduce_scatter(parts, parts[peers.rank], group)
    ring_all_gather(parts[peers.rank], parts, group)


def _ordered_column(peers: Peers, column: list[Tensor], out: Tensor) -> Column:
    """Send every rank its part of a column, receive this rank's part from all ranks, and add these in rank order."""
    rank, size = peers.rank, peers.size
    own = column[rank]
    parts = [own if other == rank else torch.empty_like(own) for other in range(size)]
    yield from _pairs_column(peers, column, parts)
    total = parts[0]
    for other, part in enumerate(parts[1:], start=1):
        # Never write to `own`, which belongs to the caller. If `total` is `own`, write to `part` instead.
        total = torch.add(total, part, out=out if other == size - 1 else part if total is own else total)
    if size == 1:
        copy(own, out)


def _pairs_column(peers: Peers, sending: list[Tensor], receiving: list[Tensor]) -> Column:
    """Exchange parts of a column with every rank, in rounds, or with NCCL in one batch."""
    rank, size = peers.rank, peers.size
    at_once = max(size - 1, 1) if sending[rank].is_cuda else AT_ONCE
    for where in slices(size - 1, at_once):
        distances = range(1, size)[where]
        works = peers.post(
            sends=[(sending[(rank + distance) % size], rank + distance) for distance in distances],
            receives=[(receiving[(rank - distance) % size], rank - distance) for distance in distances],
        )
        yield
        peers.wait(works)
