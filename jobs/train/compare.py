"""Two tensors that ought to be equal: are their bits, and if not, how far apart are they?

Tolerances of the tight class. Mode and reference add the same shards' gradients, bit for bit, in another order:

  first gradient   V numbers added in any order, and divided before or after, are off by at most V roundings each,
                   so two orders by 2 V eps m, where m is the mean over shards of |gradient|. Derived, no margin.
  parameters,      Rounding is amplified by the steps that follow, by how much depends on the job (AdamW divides a
  losses, output   gradient that is only noise by its own size). So it is measured: `MARGIN` times the distance
                   between the reference and itself in another order, plus steps x V x eps x largest value for
                   tensors so small that the two orders happened to agree.

eps is that of the precision (1.2e-7 for fp32, 2.2e-16 for fp64), so fp64 is held 5e8 times tighter.
"""

from dataclasses import asdict, dataclass
from typing import Any, Final

import torch
from torch import Tensor

MARGIN: Final = 16.0
FAR: Final = 2.0**62  # beyond it the distance of two float64 does not fit an int64
BITS: Final = {torch.float64: torch.int64, torch.float32: torch.int32, torch.float16: torch.int16}


@dataclass(frozen=True)
class Row:
    """How one tensor compares: `ulp` counts representable numbers between the two, None for integers."""

    name: str
    kind: str
    shape: list[int]
    bitwise: bool
    ulp: int | None
    difference: float
    tolerance: float
    ok: bool

    def record(self) -> dict[str, Any]:
        """Return this row as plain JSON values."""
        return asdict(self)


def compare(name: str, kind: str, found: Tensor, wanted: Tensor, tolerance: float) -> Row:
    """Compare two tensors of one shape and dtype; a tolerance of 0 demands the same bits."""
    bitwise = same_bits(found, wanted)
    difference = 0.0 if bitwise else max_difference(found, wanted)
    ulp = ulp_distance(found, wanted) if found.dtype in BITS and found.numel() else None
    ok = bitwise or (tolerance > 0.0 and difference <= tolerance)
    return Row(name, kind, list(found.shape), bitwise, ulp, difference, tolerance, ok)


def same_bits(found: Tensor, wanted: Tensor) -> bool:
    """True when the bytes are the same: NaN equals itself, 0 differs from -0."""
    return torch.equal(*(each.contiguous().reshape(-1).view(torch.uint8) for each in (found, wanted)))


def max_difference(found: Tensor, wanted: Tensor) -> float:
    """Return the largest absolute difference; infinite when one side is not a number."""
    if found.numel() == 0:
        return 0.0
    largest = float((found.double() - wanted.double()).abs().max())
    return largest if largest == largest else float("inf")


def ulp_distance(found: Tensor, wanted: Tensor) -> int:
    """Return the largest number of steps between neighbouring floats that lead from one value to the other."""
    left, right = _ordered(found), _ordered(wanted)
    rough = float((left.double() - right.double()).abs().max())
    return int(rough) if rough >= FAR else int((left - right).abs().max())


def _ordered(values: Tensor) -> Tensor:
    """Map floats to integers in the same order: neighbours differ by 1, and -0 is 0."""
    integers = values.detach().contiguous().view(BITS[values.dtype])
    lowest = torch.iinfo(integers.dtype).min
    integers = integers.long()
    return torch.where(integers < 0, lowest - integers, integers)


def gradient_tolerance(magnitude: float, virtual_ranks: int, dtype: torch.dtype) -> float:
    """Bound the distance of two orders of summation of one gradient; see above."""
    return 2.0 * virtual_ranks * torch.finfo(dtype).eps * magnitude


def measured_tolerance(
    wanted: Tensor, reordered: Tensor, *, steps: int, virtual_ranks: int, dtype: torch.dtype
) -> float:
    """Return how far the tight class lets a tensor be from the reference; see above."""
    if not wanted.is_floating_point() or wanted.numel() == 0:
        return 0.0
    largest = float(wanted.abs().max())
    return MARGIN * max_difference(wanted, reordered) + steps * virtual_ranks * torch.finfo(dtype).eps * largest
