"""The cost of an exchange, as counts that are multiplied by a cluster's fitted constants. Pure.

The time of an exchange of S bytes between n ranks is modelled as

    t = base + max(links, hosts)
    links = steps * alpha + link_bytes * beta                                                      Hockney's model
            + rank_bytes * epsilon + reduced_bytes * gamma + copied_bytes * delta                  a rank's work
    hosts = host_messages * overhead + host_bytes / W + (host_reduced * gamma + host_copied * delta) / cores

The ranks of a host share its cores, and `hosts` is their total work. An algorithm only determines the counts in `Cost`,
which are the same on all clusters. n ranks are on k nodes, n / k on each, in order. A ring enters and leaves every node
once, so each link between nodes carries the bytes that one rank sends.

Sources: Hockney, "The communication challenge for MPP" (1994): alpha + bytes * beta. Thakur, Rabenseifner and Gropp,
"Optimization of collective communication operations in MPICH" (2005): trees, pairwise exchange. Patarasuk and Yuan,
"Bandwidth optimal all-reduce" (2009): 2 (n - 1) / n * S for each rank is the minimum, and the ring reaches it.
NCCL's `tuning.cc`: rings. gloo's `allreduce.cc`, `reduce.cc` and `broadcast.cc`, and torch's `ProcessGroupGloo.cpp`:
the algorithms that gloo's operations actually use.
"""

from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Final

from muster.collectives_bench.catalog import OPERATIONS
from muster.jobs.basics.errors import UsageError
from muster.jobs.basics.words import unknown


@dataclass(frozen=True)
class Cost:
    """The counts of one exchange: for the longest chain of messages, for the busiest rank, and for the busiest host."""

    steps: float = 0.0  # messages in sequence
    link_bytes: float = 0.0  # bytes that the busiest link carries in one direction
    rank_bytes: float = 0.0  # bytes sent plus received by the busiest rank, because its core works for both directions
    host_messages: float = 0.0  # messages sent by the ranks of the busiest host
    host_bytes: float = 0.0  # (bytes sent + received) / 2 by the busiest host's ranks; with one host, all bytes sent
    reduced_bytes: float = 0.0  # bytes summed by the busiest rank
    copied_bytes: float = 0.0  # bytes copied by the busiest rank, without the copies for sending
    host_reduced: float = 0.0  # bytes summed by all ranks of the busiest host
    host_copied: float = 0.0

    def __add__(self, other: "Cost") -> "Cost":
        """Return the counts of two exchanges in sequence."""
        return Cost(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))


def _reducing(size: float, ranks_here: float) -> Cost:
    """Return the counts of a sum of `size` bytes on each rank of a host."""
    return Cost(reduced_bytes=size, host_reduced=size * ranks_here)


def _copying(size: float, ranks_here: float) -> Cost:
    return Cost(copied_bytes=size, host_copied=size * ranks_here)


Algorithm = Callable[[float, int, int], Cost]  # (S in bytes, ranks, nodes) -> counts


def rounds(ranks: int) -> int:
    """Return ceil(log2 n), the number of rounds of a binomial tree."""
    return max(ranks - 1, 0).bit_length()


def _ring(steps: int, size: float, n: int, k: int) -> Cost:
    """Return the counts of `steps` rounds in which every rank sends a chunk of S / n to the next rank."""
    sent = steps * size / n
    return Cost(steps, sent, 2 * sent, steps * n / k, sent * n / k)


def ring_all_gather(size: float, n: int, k: int) -> Cost:
    """Return the counts of (n - 1) alpha + (n - 1) / n S beta."""
    return _ring(n - 1, size, n, k)


def ring_reduce_scatter(size: float, n: int, k: int) -> Cost:
    """Return the counts of (n - 1) alpha + (n - 1) / n S (beta + gamma)."""
    return _ring(n - 1, size, n, k) + _reducing((n - 1) / n * size, n / k)


def ring_all_reduce(size: float, n: int, k: int) -> Cost:
    """Return the counts of 2 (n - 1) alpha + 2 (n - 1) / n S beta + (n - 1) / n S gamma."""
    return ring_reduce_scatter(size, n, k) + ring_all_gather(size, n, k)


def gloo_reduce(size: float, n: int, k: int) -> Cost:
    """Return the counts of a ring reduce-scatter over all segments, after which all ranks send chunks to the root."""
    whole = Cost(n, size, 2 * size, n * n / k, size * n / k)
    return whole + _reducing((n - 1) / n * size, n / k) + direct(size, n, k)


def tree_broadcast(size: float, n: int, k: int) -> Cost:
    """Return the counts of ceil(log2 n) (alpha + S beta): a binomial tree that sends the whole buffer in each round."""
    times = rounds(n)
    return Cost(times, times * size, times * size, (n - 1) / k, (n - 1) / k * size)


def gloo_broadcast(size: float, n: int, k: int) -> Cost:
    """Return the counts of a tree in which every rank sends to all its children at the same time.

    These sends share the rank's link, so the child with the most work also waits until all sends end. The time is S
    beta times 1, 2, 3 for n = 2, 3, 4, and d (d + 1) / 2 for n = 2^d. If rounds ran in sequence, the factor would be d.
    """
    times = _at_once(0, n)
    return Cost(times, times * size, times * size, (n - 1) / k, (n - 1) / k * size)


def _at_once(rank: int, n: int) -> int:
    """Count the buffer transfers that run in sequence in the subtree of a rank.

    The children of rank r are r + 2^i with 2^i > r.
    """
    children = [rank + 2**i for i in range(rank.bit_length(), n.bit_length()) if rank + 2**i < n]
    return len(children) + max((_at_once(child, n) for child in children), default=0)


def tree_reduce(size: float, n: int, k: int) -> Cost:
    """Return the counts of ceil(log2 n) (alpha + S beta + S gamma)."""
    summed = Cost(reduced_bytes=rounds(n) * size, host_reduced=(n - 1) / k * size)
    return tree_broadcast(size, n, k) + summed


def chain_broadcast(size: float, n: int, k: int) -> Cost:
    """Return the counts of (n - 1) alpha + S beta: a ring with so many slices that filling it takes no time (NCCL)."""
    return Cost(n - 1, size, min(n - 1, 2) * size, (n - 1) / k, (n - 1) / k * size)


def direct(size: float, n: int, k: int) -> Cost:
    """Return the counts of (n - 1) alpha + (n - 1) / n S beta: the root exchanges a chunk with every other rank."""
    near = n // k  # chunks of ranks on the root's host pass no link between nodes
    remote = (n - near) / n * size if k > 1 else (n - 1) / n * size
    return Cost(n - 1, remote, (n - 1) / n * size, n - 1, (near - 1) / n * size + (n - near) / n * size / 2)


def pairwise(size: float, n: int, k: int) -> Cost:
    """Return the counts of (n - 1) alpha + (n - 1) / n S beta: in round i, rank r sends a chunk to rank r + i."""
    near = n // k
    link = near * (n - near) / n * size if k > 1 else (n - 1) / n * size
    return Cost(n - 1, link, 2 * (n - 1) / n * size, (n - 1) * near, near * (n - 1) / n * size)


# The textbook algorithm of each operation. LIBRARIES lists the operations for which a library uses another algorithm.
TEXTBOOK: Final[dict[str, Algorithm]] = {
    "all_reduce": ring_all_reduce,
    "all_gather": ring_all_gather,
    "reduce_scatter": ring_reduce_scatter,
    "broadcast": tree_broadcast,
    "reduce": tree_reduce,
    "gather": direct,
    "scatter": direct,
    "all_to_all": pairwise,
    # Alpha + S beta: one message, or all ranks send to the next at the same time.
    "send_recv": lambda size, n, k: Cost(1, size, 2 * size, n / k, size * n / k),
    "ping_pong": lambda size, n, k: Cost(1, size, size, 1, size if k == 1 else size / 2),
    # ceil(log2 n) alpha: in round i, rank r sends a message to rank r + 2^i.
    "barrier": lambda size, n, k: Cost(rounds(n), host_messages=rounds(n) * n / k),
    "ring_all_reduce": ring_all_reduce,
    "ring_reduce_scatter": ring_reduce_scatter,
    "ring_all_gather": ring_all_gather,
    "tree_broadcast": tree_broadcast,
    "tree_reduce": tree_reduce,
    # A pairwise exchange, then (n - 1) sums of a chunk in rank order.
    "exchange_reduce_scatter": lambda size, n, k: pairwise(size, n, k) + _reducing((n - 1) / n * size, n / k),
    # 2 (n - 1) (alpha + S beta) + (n - 1) S gamma: the root receives every whole buffer and sends the mean back.
    "gather_scatter": lambda size, n, k: direct(n * size, n, k) + direct(n * size, n, k) + _reducing((n - 1) * size, 1),
}
LIBRARIES: Final[dict[str, dict[str, Algorithm]]] = {
    "gloo": {
        # A ring into a temporary buffer, then a copy of the whole buffer.
        "all_gather": lambda size, n, k: ring_all_gather(size, n, k) + _copying(size, n / k),
        # As in torch: an all_reduce of a copy of the input, then a copy of one chunk.
        "reduce_scatter": lambda size, n, k: ring_all_reduce(size, n, k) + _copying(size + size / n, n / k),
        "broadcast": gloo_broadcast,
        "reduce": gloo_reduce,
        # Every rank sends to the root, into a temporary buffer, then a copy of the whole buffer.
        "gather": lambda size, n, k: direct(size, n, k) + _copying(size, 1),
    },
    "nccl": {
        "broadcast": chain_broadcast,
        "reduce": lambda size, n, k: chain_broadcast(size, n, k) + _reducing(size, n / k),
    },
    "": {},
}


def algorithm_of(operation: str, backend: str = "") -> Algorithm:
    """Return the algorithm of a library's operation, or the textbook algorithm if `backend` is empty.

    Raises:
        UsageError: if there is no such operation.
    """
    if operation not in TEXTBOOK:
        raise UsageError(unknown("operation", operation, tuple(TEXTBOOK)))
    return LIBRARIES.get(backend, {}).get(operation, TEXTBOOK[operation])


def cost(operation: str, nbytes: float, *, ranks: int, nodes: int = 1, backend: str = "") -> Cost:
    """Return the counts of an operation on S = `nbytes` bytes; all 0 for a single rank."""
    if ranks <= 1:
        return Cost()
    return algorithm_of(operation, backend)(nbytes if OPERATIONS[operation].has_size else 0.0, ranks, nodes)
