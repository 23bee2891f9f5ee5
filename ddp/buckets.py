"""Assign gradients to buckets: a pure function of their sizes, the same on every rank.

In the backward, gradients become ready roughly in the reverse order of registration. Buckets are filled and launched in
this order:

    registered    a b c d e f g h
    buckets       [h g] [f e d] [c b a]        h is ready first; [h g] is sent while f is being computed

If there are several buckets, the first one is small, so that communication begins early. All gradients of a bucket have
the same dtype. Buckets of different dtypes are ordered by the expected time of their last gradient.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Final

FIRST_BYTES: Final = 2**20  # the default of torch's DDP
MB: Final = 2**20
ALONE_BYTES: Final = 4 * MB  # on a CPU, a gradient of at least this size gets its own bucket, which needs no copy


@dataclass(frozen=True)
class GradientSize:
    """The size of one gradient, and its kind (such as its dtype and device).

    All gradients of a bucket have the same kind.
    """

    elements: int
    itemsize: int
    kind: Hashable = None

    @property
    def bytes(self) -> int:
        """Bytes of the gradient."""
        return self.elements * self.itemsize


def require_size(bucket_size_mb: object) -> None:
    """Check a bucket size that a user set.

    Raises:
        ValueError: If the size is neither None nor a finite number of MB that is at least 0.
    """
    is_number = isinstance(bucket_size_mb, int | float) and not isinstance(bucket_size_mb, bool)
    if not (bucket_size_mb is None or (is_number and 0 <= bucket_size_mb < math.inf)):  # type: ignore[operator]
        raise ValueError(f"bucket_size_mb must be a number of MB, or None for one bucket, got {bucket_size_mb!r}")


def plan_buckets(
    sizes: Sequence[GradientSize], bucket_size_mb: float | None, alone_bytes: int | None = None
) -> list[tuple[int, ...]]:
    """Assign gradients, in the order of registration, to buckets of at most `bucket_size_mb` MB of 2^20 bytes.

    A gradient above this limit gets its own bucket. With a limit of 0, every gradient gets its own bucket; with None,
    there is one bucket per kind. If there are several buckets anyway, a gradient of at least `alone_bytes` also gets
    its own bucket. Returns the indices in `sizes` for each bucket, in the order of launches.
    """
    if bucket_size_mb is None:
        return _fill(sizes, limit=None, first=None)
    limit = int(bucket_size_mb * MB)
    buckets = _fill(sizes, limit=limit, first=None)
    if len(buckets) > 1:
        buckets = _fill(sizes, limit=limit, first=min(limit, FIRST_BYTES), alone=alone_bytes)
    return buckets


def _fill(
    sizes: Sequence[GradientSize], *, limit: int | None, first: int | None, alone: int | None = None
) -> list[tuple[int, ...]]:
    """Fill one bucket of each kind at a time. `first` is the limit of the first bucket."""
    closed: list[list[int]] = []
    open_: dict[Hashable, list[int]] = {}
    filled: dict[Hashable, int] = {}
    for place in reversed(range(len(sizes))):
        size = sizes[place]
        if alone is not None and size.bytes >= alone:
            closed.append([place])
            continue
        bound = first if first is not None and not closed else limit
        if size.kind in open_ and bound is not None and filled[size.kind] + size.bytes > bound:
            closed.append(open_.pop(size.kind))
        if size.kind not in open_:
            open_[size.kind], filled[size.kind] = [], 0
        open_[size.kind].append(place)
        filled[size.kind] += size.bytes
    closed += open_.values()
    return [tuple(bucket) for bucket in sorted(closed, key=lambda bucket: -bucket[-1])]
