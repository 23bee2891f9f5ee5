"""Closed-form textbook results: the steps and bytes of a ring, and the best bucket size. Pure.

ring       all-reduce: 2 (N - 1) steps of X / N bytes, so a rank sends 2 (N - 1) / N X; each half: N - 1 steps
buckets    n buckets cost s / (w n) + n o beyond the backward: the last bucket's time, and an overhead for each. The
           minimum is at n = sqrt(s / (w o)), with buckets of sqrt(s w o) bytes
"""

import math
from collections.abc import Callable
from typing import Final

RINGS: Final = {  # number of passes, each of N - 1 steps
    **dict.fromkeys(("all_reduce", "ring_all_reduce"), 2),
    **dict.fromkeys(("all_gather", "reduce_scatter", "ring_all_gather", "ring_reduce_scatter"), 1),
}


def ring_of(operation: str, nbytes: int, ranks: int) -> dict[str, float] | None:
    """Return the steps and bytes of a ring; None if the operation is not a ring, or there is only one rank."""
    if operation not in RINGS or ranks < 2:
        return None
    steps = RINGS[operation] * (ranks - 1)
    return {"bytes": nbytes, "ranks": ranks, "steps": steps, "bytes_per_rank": steps * nbytes / ranks}


def best_bucket(nbytes: int, time_of: Callable[[int], float], least: int, host_s: float) -> dict[str, float] | None:
    """Return the best bucket size for `nbytes` of gradients; None if no line can be fitted to the times.

    w and o are computed from the line through the times for `least` bytes and for all bytes. `host_s` is a part of o.
    """
    small, whole = time_of(least), time_of(nbytes)
    if nbytes <= least or whole <= small or small + host_s <= 0:
        return None
    bandwidth, overhead_s = (nbytes - least) / (whole - small), small + host_s
    count = max(math.sqrt(nbytes / (bandwidth * overhead_s)), 1.0)
    return {
        "bytes": nbytes,
        "bandwidth": bandwidth,
        "overhead_s": overhead_s,
        "buckets": count,
        "bucket_bytes": nbytes / count,
        "cost_s": nbytes / (bandwidth * count) + count * overhead_s,
    }
