"""Binomial trees of ceil(log2 n) rounds.

Each round doubles the number of ranks that have the data, or halves the number of partial sums.
"""

import torch
from torch import Tensor

from muster.ddp.primitives.columns import Column, interleave, segments_of
from muster.ddp.primitives.peers import Group, Peers


def tree_broadcast(tensor: Tensor, root: int = 0, group: Group = None) -> None:
    """Broadcast the tensor of the root rank along a binomial tree of ceil(log2 n) rounds.

    Raises:
        ValueError: If the tensor is not flat and contiguous, or the root or this rank is not in the group.
    """
    peers = Peers(group, root)
    peers.check([tensor], "tensor")
    place = (peers.rank - root) % peers.size  # position in the tree; the root has position 0
    for distance in _distances(peers.size):
        # 0 -> 4 | 0 -> 2, 4 -> 6 | 0 -> 1, 2 -> 3, 4 -> 5, 6 -> 7
        if place % (2 * distance) == 0 and place + distance < peers.size:
            peers.wait(peers.post(sends=[(tensor, place + distance + root)]))
        elif place % (2 * distance) == distance:
            peers.wait(peers.post(receives=[(tensor, place - distance + root)]))


def tree_reduce(tensor: Tensor, root: int = 0, group: Group = None) -> None:
    """Replace the root's tensor by the sum over ranks, along a binomial tree of ceil(log2 n) rounds.

    The other ranks' tensors contain meaningless partial sums afterwards.

    Raises:
        ValueError: If the tensor is not flat and contiguous, or the root or this rank is not in the group.
    """
    peers = Peers(group, root)
    peers.check([tensor], "tensor")
    place = (peers.rank - root) % peers.size
    for distance in reversed(_distances(peers.size)):
        # 1 -> 0, 3 -> 2, 5 -> 4, 7 -> 6 | 2 -> 0, 6 -> 4 | 4 -> 0
        if place % (2 * distance) == distance:
            interleave(_send_column(peers, part, place - distance + root) for part in segments_of(tensor))
        elif place % (2 * distance) == 0 and place + distance < peers.size:
            interleave(_add_column(peers, part, place + distance + root) for part in segments_of(tensor))


def _send_column(peers: Peers, part: Tensor, to: int) -> Column:
    works = peers.post(sends=[(part, to)])
    yield
    peers.wait(works)


def _add_column(peers: Peers, part: Tensor, source: int) -> Column:
    received = torch.empty_like(part)
    works = peers.post(receives=[(received, source)])
    yield
    peers.wait(works)
    part += received


def _distances(size: int) -> list[int]:
    """List the distance between sender and receiver in each round: 4, 2, 1 for 5 to 8 ranks."""
    return [2**power for power in reversed(range((size - 1).bit_length()))]
