"""Collectives built from send and recv: rings, trees and exchanges over any group of ranks.

    ring       rank r hears of r - 1 only and speaks to r + 1 only: every link carries (n - 1) / n of the bytes
               (Patarasuk and Yuan 2009: none can do with less)
    tree       ceil(log2 n) rounds; in round k half of those who have the data hand it on
    exchange   in round i rank r sends to r + i and receives from r - i: every pair meets once

Tensors are flat and contiguous, of one type and device. What is cut in n chunks may be a sequence of n tensors, whose
lengths may differ but must be the same on every rank, or one tensor that is cut as `chunks_of` does. Ranks are those
*of the group*. All ranks of the group must call, and NCCL must have run a collective on it before. What does not fit
together on this rank is refused before anything is sent; lengths that differ between ranks nobody sees.

Long tensors go in *columns*: the same short slice of every chunk, each a ring of its own. While one column's message is
under way another's is added, and what is held beside the tensors stays below some MB, however long they are.
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
