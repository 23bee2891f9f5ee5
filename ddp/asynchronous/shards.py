"""Shards of parameters over servers, and the bytes that a step sends. Pure.

All W ranks are workers. The model has P parameters of b bytes each. Ranks 0 to S - 1 also serve one shard each, of p
parameters. In a step, a worker sends its gradient to the servers, and they send it the new parameters. A rank sends
nothing to itself.

    rank < S     (P - p) b + (W - 1) p b      the gradient of other shards; its own p elements to W - 1 workers
    rank >= S    P b

All ranks together send 2 (W - 1) P b. With S = W, every rank sends 2 (W - 1) / W P b, as in a ring all-reduce.
"""

from itertools import pairwise
from typing import Final

HEADER_BYTES: Final = 16  # the size of a request, and of a reply


def bounds(elements: int, servers: int) -> list[tuple[int, int]]:
    """Cut `elements` into one range [start, stop) per server. Lengths differ by at most one."""
    cuts = [elements * server // servers for server in range(servers + 1)]
    return list(pairwise(cuts))


def sent_bytes(elements: int, itemsize: int, workers: int, servers: int, *, headers: bool = True) -> list[int]:
    """Return the bytes that each rank sends while every worker makes one step."""
    shards = [stop - start for start, stop in bounds(elements, servers)]
    shards += [0] * (workers - servers)
    header = HEADER_BYTES if headers else 0
    return [
        (elements - own) * itemsize
        + (servers - (rank < servers)) * header
        + ((workers - 1) * (own * itemsize + header) if rank < servers else 0)
        for rank, own in enumerate(shards)
    ]
