"""Closed forms of textbooks: a ring's steps and bytes, bytes at pipeline boundaries, the best bucket. Pure.

ring         all-reduce: 2 (N - 1) steps of X / N bytes, so a rank sends 2 (N - 1) / N X; its halves: one each
boundaries   (P - 1) B N_f bytes a forward, where each of P - 1 boundaries passes N_f bytes a sample; a backward
             passes their gradients, which are as many
buckets      n buckets cost s / (w n) + n o beyond the backward: the last one's time, and an overhead each. The
             least is at n = sqrt(s / (w o)), buckets of sqrt(s w o) bytes
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

RINGS: Final = {  # how often (N - 1) / N of the bytes pass each rank
    "all_reduce": 2,
    "all_gather": 1,
    "reduce_scatter": 1,
    "ring_all_reduce": 2,
    "ring_all_gather": 1,
    "ring_reduce_scatter": 1,
}


@dataclass(frozen=True)
class Ring:
    """A ring's messages: `passes` times N - 1 steps."""

    passes: int
    ranks: int
    nbytes: int

    @property
    def steps(self) -> int:
        """Messages of a rank, one after another."""
        return self.passes * (self.ranks - 1)

    @property
    def sent_bytes(self) -> float:
        """What a rank sends."""
        return self.steps * self.nbytes / self.ranks


@dataclass(frozen=True)
class BestBucket:
    """The closed form of the best bucket, and what it was computed from."""

    nbytes: int  # s, of all gradients
    bandwidth: float  # w, in bytes per second
    overhead_s: float  # o, of a collective

    @property
    def buckets(self) -> float:
        """The best number of buckets; one at least."""
        return max(math.sqrt(self.nbytes / (self.bandwidth * self.overhead_s)), 1.0)

    @property
    def bucket_bytes(self) -> float:
        """The bytes of a bucket."""
        return self.nbytes / self.buckets

    def cost_s(self, buckets: float) -> float:
        """Return the time beyond the backward."""
        return self.nbytes / (self.bandwidth * buckets) + buckets * self.overhead_s


def ring_of(operation: str, nbytes: int, ranks: int) -> Ring | None:
    """Return the ring of an operation; None where it is no ring, or a rank is alone."""
    return Ring(RINGS[operation], ranks, nbytes) if operation in RINGS and ranks > 1 else None


def best_bucket(nbytes: int, time_of: Callable[[int], float], least: int, host_s: float) -> BestBucket | None:
    """Return the closed form for `nbytes` of gradients; None where no line goes through the times.

    w and o are those of the line through the times of `least` and of all bytes; `host_s` is a part of o.
    """
    if nbytes <= least:
        return None
    small, whole = time_of(least), time_of(nbytes)
    if not whole > small or not small + host_s > 0:
        return None
    return BestBucket(nbytes, (nbytes - least) / (whole - small), small + host_s)


def boundary_bytes(batch: int, elements: Sequence[int], itemsize: int) -> int:
    """Return what passes all boundaries in a forward, of their elements for one sample."""
    return batch * sum(elements) * itemsize
