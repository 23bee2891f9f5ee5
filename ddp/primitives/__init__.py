"""Collectives built from send and recv: rings, trees and exchanges over any group of ranks.

    ring       rank r receives from r - 1 and sends to r + 1: every link carries (n - 1) / n of the bytes
               (Patarasuk and Yuan 2009: this is optimal)
    tree       ceil(log2 n) rounds; in each round, every rank that has the data sends it to one that does not
    exchange   in round i rank r sends to r + i and receives from r - i; after n - 1 rounds all have met

Tensors must be flat and contiguous, and have the same dtype and device. Chunks are passed as a sequence of n tensors,
or as one tensor, which is cut by `chunks_of`. Their lengths may differ, but must be the same on every rank. Ranks are
numbered within the group. All ranks of the group must make the call. With NCCL, the group must have run one of the
backend's collectives before. If tensors on this rank do not fit together, an error is raised before anything is sent.
Mismatches between ranks are not detected.

Long tensors are processed in *columns*. A column consists of the same short slice of every chunk, and has its own ring.
While a message of one column is in transit, another column is summed. The extra memory is a few MB for any length.
"""

from muster.ddp.primitives.exchanges import exchange, ordered_all_reduce, ordered_reduce_scatter
from muster.ddp.primitives.peers import all_gather, begin, chunks_of, reduce_scatter, wait
from muster.ddp.primitives.rings import ring_all_gather, ring_all_reduce, ring_reduce_scatter
from muster.ddp.primitives.trees import tree_broadcast, tree_reduce

__all__ = [
    "all_gather",
    "begin",
    "chunks_of",
    "exchange",
    "ordered_all_reduce",
    "ordered_reduce_scatter",
    "reduce_scatter",
    "ring_all_gather",
    "ring_all_reduce",
    "ring_reduce_scatter",
    "tree_broadcast",
    "tree_reduce",
    "wait",
]
