"""Compute the range of the global tensor that a DTensor's local part covers.

(6, 4), Shard(0) over 4 ranks       rows 0:2, 2:4, 4:6 and none: cut like torch.chunk
Shard(0) over tp, then over dp      [_StridedShard(0, split_factor=2), Shard(0)]: the mesh's last dimension cuts first
"""

import math
from typing import Any, Final

from muster.jobs.basics.errors import RefusedError
from muster.jobs.checkpoint.pieces import Range

DTENSOR: Final = "torch.distributed.tensor"


def box_of(name: str, tensor: Any) -> tuple[tuple[Range, ...], bool]:
    """Return this rank's box (its range in each dimension), and whether it is the first rank with this box.

    Raises:
        RefusedError: if the DTensor is a partial sum, or its local part is not a single box.
    """
    mesh, placements = tensor.device_mesh, tensor.placements
    place = mesh.get_coordinate()
    box = [(0, size) for size in tensor.shape]
    if place is None:  # this rank is outside the mesh
        return tuple((0, 0) for _ in box), False
    for kind in placements:
        if kind.is_partial():
            raise RefusedError(
                f"state: {name}: a DTensor with the placement {kind} holds partial sums, which cannot be stored; "
                "redistribute it to Shard or Replicate first"
            )
    for axis in _order(name, placements, mesh):
        dimension = placements[axis].dim
        start, stop = box[dimension]
        length = -(-(stop - start) // mesh.size(axis))
        begin = min(stop, start + length * place[axis])
        box[dimension] = (begin, min(stop, begin + length))
    extent = [stop - start for start, stop in box]
    if math.prod(extent) != tensor._local_tensor.numel():
        raise _not_a_box(name, placements)
    first = all(place[axis] == 0 for axis, kind in enumerate(placements) if kind.is_replicate())
    return tuple(box), first


def _order(name: str, placements: Any, mesh: Any) -> list[int]:
    """List the mesh dimensions that shard the tensor, in the order in which they cut it."""
    order: list[int] = []
    # Strided shards, cut after other mesh dimensions: (tensor dimension, number of parts cut before, mesh dimension).
    waiting: list[tuple[int, int, int]] = []
    for axis, kind in enumerate(placements):
        if kind.is_replicate():
            continue
        factor = getattr(kind, "split_factor", 1)
        if factor > 1:
            waiting.append((kind.dim, factor, axis))
            continue
        order.append(axis)
        still = []
        for dimension, left, held in waiting:
            left = left // mesh.size(axis) if dimension == kind.dim else left
            if left > 1:
                still.append((dimension, left, held))
            else:
                order.append(held)
        waiting = still
    if waiting:
        raise _not_a_box(name, placements)
    return order


def _not_a_box(name: str, placements: Any) -> RefusedError:
    return RefusedError(
        f"state: {name}: the local part of a DTensor with the placements {placements} is not one block of the whole; "
        "redistribute it to Shard or Replicate first"
    )
