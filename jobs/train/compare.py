"""Two tensors that ought to be equal: are their bits, and if not, how far apart are they?

Each class demands this of every step:

  bitwise  mode and reference train on their own; gradients, parameters, buffers, losses and output have the same bits.
  tight    the mode adds the same gradients in another order, so its sum may be off by rounding. How far such an error
           grows in later steps belongs to the job and not to the mode (one flipped maximum in a pool is a jump), so the
           reference follows the mode: from the same state it computes its own gradient, compares, and then steps
           with the mode's. Gradients must lie within a derived bound; all else must have the same bits.
  near     the mode adds within the forward and the backward in another order, too, so that nothing before the optimizer
           has the same bits. The reference follows; gradients, losses and output must lie within what `rounding.py`
           finds that rounding reaches from that state, gradients within the bound besides; all else must have the
           same bits.

The bound. V numbers added in any order and divided before or after are off by at most V roundings, each of at most
eps times the sum of their magnitudes; two orders by 2 V eps m, where m is the mean over shards of |gradient| (its
largest element). With clipping the norms differ too, relatively by at most 2 V eps |m|_2 / |g|_2. eps is that of the
gradients, or of the type that they are sent as if that is coarser: fp64 is held 5e8 times tighter than fp32, a
communication dtype of bf16 65536 times looser. A type whose numbers end early, as fp16's do at 6e-8, loses up to that
much of each besides. The distance after all steps on their own is shown as drift.
"""

from dataclasses import asdict, dataclass
from typing import Any, Final

import torch
from torch import Tensor

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
    drift: float | None = None  # from the reference that trained on its own, when that is not what is judged

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


def gradient_bound(magnitude: float, virtual_ranks: int, *dtypes: torch.dtype) -> float:
    """Return 2 V (eps m + the smallest number): how far two orders of summation of one gradient may be apart.

    `dtypes` are those that it is held and sent in.
    """
    infos = [torch.finfo(dtype) for dtype in dtypes]
    smallest = max(info.smallest_normal * info.eps for info in infos)
    return 2.0 * virtual_ranks * (max(info.eps for info in infos) * magnitude + smallest)
