"""Cross-entropy of logits whose classes are split over ranks, without gathering whole rows.

    loss of a row = log sum exp(logit - m) - (logit of the target - m)      m: the row's largest logit

Ranks exchange three numbers per row: its maximum, then the sum and the target's logit together. The backward sends
nothing.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from muster.ddp.compiler import outside
from muster.pipe.tensor.region import Region
from muster.pipe.weighing import IGNORED


class SplitCrossEntropy:
    """The mean cross-entropy of logits (..., classes of this rank, or all classes) against targets (...).

    It is computed in float32 or wider, with the same bits on every rank. Rows with the target -100 do not count.

    Raises:
        ValueError: If the number of logits is wrong, or (only checked on CPUs) a target is not a class.
    """

    def __init__(self, region: Region, classes: int) -> None:
        self.region = region
        self.classes = classes

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss, a scalar."""
        # logits (rows, classes of this rank), targets (rows,)
        flat, wanted = logits.reshape(-1, logits.shape[-1]), targets.flatten()
        wide = torch.promote_types(flat.dtype, torch.float32)
        require_within(wanted, self.classes, "target", spared=IGNORED)
        if flat.shape[-1] == self.classes:
            return functional.cross_entropy(flat.to(wide), wanted)
        start, stop = self.region.share(self.classes)
        if flat.shape[-1] != stop - start:
            raise ValueError(
                f"cross-entropy over {self.classes} classes on {self.region.ranks} ranks: logits have "
                f"{flat.shape[-1]} classes; expected this rank's {stop - start}, or all"
            )
        loss: Tensor = outside(_SplitLoss.apply, self.region, flat, wanted, start, wide)
        return loss


def require_within(index: Tensor, size: int, what: str, spared: int = 0) -> None:
    """Check that indices are in [0, size) or equal to `spared`. Only on CPUs: on a GPU, the host would have to wait.

    Raises:
        ValueError: If an index is outside this range.
    """
    if index.device.type != "cpu" or not index.numel():
        return
    wrong = ((index < 0) | (index >= size)) & (index != spared)
    if wrong.any():
        raise ValueError(f"{what} {int(index[wrong][0])} is outside the vocabulary of {size}; expected 0 to {size - 1}")


class _SplitLoss(torch.autograd.Function):
    """Compute the mean loss of logits (rows, classes of this rank, beginning at `start`) against targets (rows,)."""

    @staticmethod
    def forward(ctx: Any, region: Region, logits: Tensor, targets: Tensor, start: int, wide: torch.dtype) -> Tensor:
        largest = region.begin_maximum(logits.amax(-1).to(wide))()
        shifted = logits - largest[:, None]  # the only copy of the logits; it has the wider type
        own = targets - start
        is_own = (own >= 0) & (own < logits.shape[-1])
        own = own.where(is_own, 0)[:, None]
        counts = (targets != IGNORED).to(wide)
        of_target = shifted.gather(-1, own)[:, 0] * is_own
        powers = shifted.exp_()
        sums, of_target = region.begin_sum(torch.stack([powers.sum(-1), of_target]))()
        count = counts.sum()
        ctx.region, ctx.dtype = region, logits.dtype
        shares = counts / count.clamp(min=1)  # without any target the mean is NaN, and its gradient zero
        ctx.save_for_backward(powers, own, is_own, shares / sums, shares)
        losses: Tensor = (sums.log() - of_target) * counts
        return losses.sum() / count

    @staticmethod
    def backward(ctx: Any, *of_loss: Tensor) -> tuple[Tensor | None, ...]:
        ctx.region.require_first_order()
        powers, own, is_own, over_sums, over_count = ctx.saved_tensors
        of_logits = powers * (over_sums * of_loss[0])[:, None]
        of_logits.scatter_add_(-1, own, -(over_count * is_own * of_loss[0])[:, None])
        return None, of_logits.to(ctx.dtype), None, None, None
