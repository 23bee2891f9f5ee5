"""Compare the results of a class with the correct ones, and describe errors in words."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

TOLERANCE = 1e-5  # in float64, rounding errors are far smaller than this, and faults far larger

Tensors = Mapping[str, Tensor]


@torch.no_grad()
def distance(found: Tensor, wanted: Tensor) -> float:
    """Return the largest difference, relative to the largest expected value; infinite if the shapes differ."""
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
    """Return the name of the tensor with the largest distance from its expected value, and this distance."""
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
    """Describe the error in a gradient that should be the mean over the ranks; return None if it is correct.

    `own` has each rank's gradient before averaging.
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
        return f"wrong, with a relative error of {distance(found, mean):.1e}"
    times = f"{ratio:.4g} times the mean"
    return f"the sum over the ranks, not the mean ({times})" if abs(ratio - len(own)) < 0.01 else times


def few(names: Sequence[str]) -> str:
    """Format the first three names, and the number of others."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def nbytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of tensors on this rank, each storage once. A DTensor counts as this rank's part of it."""
    storages = {}
    for each in tensors:
        storage = getattr(each, "_local_tensor", each).untyped_storage()
        storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def kib(size: float) -> str:
    """Format a number of bytes in KiB."""
    return f"{size / 1024:.4g} KiB"


def half_way(world_size: int) -> float:
    """Return the largest acceptable share of a divided whole: midway between an even share and all of it."""
    return (1.0 + 1.0 / world_size) / 2.0


def share(found: int, whole: int, world_size: int) -> str:
    """Format the share of a whole that a rank has, and the share that it should have."""
    return f"{kib(found)} of {kib(whole)}, {found / whole:.2f} of the whole; divided evenly: {1 / world_size:.2f}"
