"""Compare two tensors that should be equal: bitwise, and by their distance.

Every mode belongs to one of three classes, which define the comparison of every step:

  bitwise  Mode and reference train independently. Gradients, parameters, buffers, losses and output have the same bits.
  tight    The mode sums the same gradients in another order, so its sums may be off by rounding. How far such an error
           grows in later steps depends on the job, not on the mode (if rounding changes which element of a pool is the
           largest, the result jumps). So the reference follows the mode: from the same state it computes its own
           gradient, compares, and then steps with the mode's gradient. Gradients must lie within the bound below;
           everything else must have the same bits.
  near     The mode also sums in another order within the forward and backward, so that nothing before the optimizer has
           the same bits. The reference follows the mode here, too. Gradients, losses and output must lie within the
           rounding error that `rounding.py` measures from that state, plus the bound below for gradients; everything
           else must have the same bits.

The bound for gradients: let V be the number of virtual ranks. A sum of V numbers, divided before or after summing, has
at most V rounding errors. Each error is at most eps times the sum of the magnitudes. Two orders of summation differ by
at most 2 V eps m, where m is the largest element of the mean over shards of |gradient|. With clipping the norms differ
too, relatively by at most 2 V eps |m|_2 / |g|_2. Here eps belongs to the gradients' dtype, or to the communication
dtype if that is coarser. The bound for fp64 is 5e8 times tighter than for fp32; communication in bf16 makes it 65536
times looser. Rounding to a dtype with a small exponent range also loses up to its smallest number (6e-8 in fp16) per
value. Reports show the distance after independent training as drift.
"""

from dataclasses import asdict, dataclass
from typing import Any, Final

import torch
from torch import Tensor

FAR: Final = 2.0**62  # larger distances (in ulp) between two float64 may not fit into an int64
BITS: Final = {torch.float64: torch.int64, torch.float32: torch.int32, torch.float16: torch.int16}


@dataclass(frozen=True)
class TensorComparison:
    """The comparison of one tensor. `ulp` is the largest distance in representable numbers, None for integers."""

    name: str
    kind: str
    shape: list[int]
    bitwise: bool
    ulp: int | None
    difference: float
    tolerance: float
    ok: bool
    # Difference from the independent reference; set if `difference` refers to the one that follows the mode.
    drift: float | None = None

    def record(self) -> dict[str, Any]:
        """Return this row as plain JSON values."""
        return asdict(self)


def compare(name: str, kind: str, found: Tensor, wanted: Tensor, tolerance: float) -> TensorComparison:
    """Compare two tensors of the same shape and dtype; a tolerance of 0 demands the same bits."""
    bitwise = same_bits(found, wanted)
    difference = 0.0 if bitwise else max_difference(found, wanted)
    ulp = ulp_distance(found, wanted) if found.dtype in BITS and found.numel() else None
    ok = bitwise or (tolerance > 0.0 and difference <= tolerance)
    return TensorComparison(name, kind, list(found.shape), bitwise, ulp, difference, tolerance, ok)


def same_bits(found: Tensor, wanted: Tensor) -> bool:
    """Return True if the bytes are the same: a NaN equals itself, and 0 differs from -0."""
    return torch.equal(*(each.contiguous().reshape(-1).view(torch.uint8) for each in (found, wanted)))


def max_difference(found: Tensor, wanted: Tensor) -> float:
    """Return the largest absolute difference, or infinity if a difference is NaN."""
    if found.numel() == 0:
        return 0.0
    largest = float((found.double() - wanted.double()).abs().max())
    return largest if largest == largest else float("inf")


def ulp_distance(found: Tensor, wanted: Tensor) -> int:
    """Return the largest distance between corresponding values, counted in adjacent floats."""
    left, right = _ordered(found), _ordered(wanted)
    rough = float((left.double() - right.double()).abs().max())
    return int(rough) if rough >= FAR else int((left - right).abs().max())


def _ordered(values: Tensor) -> Tensor:
    """Map floats to integers in the same order: adjacent floats differ by 1, and -0 is 0."""
    integers = values.detach().contiguous().view(BITS[values.dtype])
    lowest = torch.iinfo(integers.dtype).min
    integers = integers.long()
    return torch.where(integers < 0, lowest - integers, integers)


def gradient_bound(magnitude: float, virtual_ranks: int, *dtypes: torch.dtype) -> float:
    """Return the bound on the difference between two summation orders of one gradient: 2 V (eps m + smallest number).

    `dtypes` are the dtypes in which the gradient is stored and communicated.
    """
    infos = [torch.finfo(dtype) for dtype in dtypes]
    smallest = max(info.smallest_normal * info.eps for info in infos)
    return 2.0 * virtual_ranks * (max(info.eps for info in infos) * magnitude + smallest)
