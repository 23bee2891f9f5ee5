"""Collectives built from send and recv: rings, trees and exchanges over any group of ranks.

    ring       rank r receives from r - 1 and sends to r + 1: every link carries (n - 1) / n of the bytes
               (Patarasuk and Yuan 2009: this is optimal)
    tree       ceil(log2 n) rounds; in round k, half of the ranks with the data pass it on
    exchange   in round i rank r sends to r + i and receives from r - i: every pair exchanges once

Tensors are flat and contiguous, of one type and device. An argument with n chunks may be a sequence of n tensors, whose
lengths may differ but must be the same on every rank, or one tensor, which is cut as by `chunks_of`. Ranks are those
*of the group*. All ranks of the group must call, and NCCL must have run a collective on it before. Mismatches on this
rank are refused before anything is sent; length mismatches between ranks are not detected.

Long tensors are processed in *columns*: the same short slice of every chunk, each with a ring of its own. While one
column's message is in transit, another column is added up. The extra memory is a few MB, whatever the length.
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
