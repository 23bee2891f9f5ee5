"""Compare what a class computed with what it should have, and say in words what is wrong."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

TOLERANCE = 1e-5  # all is computed in float64, so rounding stays far below, and faults far above

Tensors = Mapping[str, Tensor]


@torch.no_grad()
def distance(found: Tensor, wanted: Tensor) -> float:
    """Return the largest difference, relative to the largest wanted value; infinite if the shapes differ."""
    if found.shape != wanted.shape:
        return float("inf")
    if found.numel() == 0:
        return 0.0
    far = float((found.detach().double() - wanted.double()).abs().max()) / max(float(wanted.double().abs().max()), 1e-9)
    return far if far == far else float("inf")


def same(found: Tensor, wanted: Tensor) -> bool:
    """Return True if two tensors differ by no more than rounding."""
    return distance(found, wanted) <= TOLERANCE


def farthest(found: Tensors, wanted: Tensors) -> tuple[str, float]:
    """Return the name of the tensor that is farthest from its wanted value, and how far."""
    far = {name: distance(found[name], wanted[name]) if name in found else float("inf") for name in wanted}
    name = max(far, key=lambda each: far[each])
    return name, far[name]


@torch.no_grad()
def factor(found: Tensor, wanted: Tensor) -> float | None:
    """Return the factor between two tensors; None if they are not proportional."""
    if found.shape != wanted.shape:
        return None
    left, right = found.detach().double().flatten(), wanted.double().flatten()
    if (square := float(right @ right)) == 0.0:
        return None
    ratio = float(left @ right) / square
    return ratio if same(left, right * ratio) and abs(ratio) > TOLERANCE else None


def fault(found: Tensor | None, mean: Tensor, own: Sequence[Tensor], rank: int) -> str | None:
    """Describe the error in a gradient that should be the mean over the ranks; None if it is right.

    `own` has the gradient of each rank alone.
    """
    if found is None:
        return "missing"
    if same(found, mean):
        return None
    if same(found, own[rank]):
        return "own"
    others = [other for other, each in enumerate(own) if same(found, each)]
    if others:
        return f"rank {others[0]}'s, not the mean"
    ratio = factor(found, mean)
    if ratio is None:
        return f"off by {distance(found, mean):.1e} of its size"
    times = f"{ratio:.4g} times the mean"
    return f"the sum over the ranks, not the mean ({times})" if abs(ratio - len(own)) < 0.01 else times


def few(names: Sequence[str]) -> str:
    """Write the first three of some names."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def nbytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of tensors on this rank, each storage once; of a DTensor those of its own part."""
    storages = {}
    for each in tensors:
        storage = getattr(each, "_local_tensor", each).untyped_storage()
        storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def kib(size: float) -> str:
    """Write a number of bytes in KiB."""
    return f"{size / 1024:.4g} KiB"


def half_way(world_size: int) -> float:
    """Return the share of a whole above which something does not count as divided among ranks."""
    return (1.0 + 1.0 / world_size) / 2.0


def share(found: int, whole: int, world_size: int) -> str:
    """Write which share of a whole a rank has, and which one it should have."""
    return f"{kib(found)} of {kib(whole)}, {found / whole:.2f} of the whole; divided evenly: {1 / world_size:.2f}"
