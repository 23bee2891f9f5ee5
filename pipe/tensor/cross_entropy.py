"""The cross-entropy of logits whose classes are split over ranks; nobody ever has all of a row.

    loss of a row = log sum exp(logit - m) - (logit of the target - m)      m: the row's largest logit

Three numbers a row travel: the largest, then the sum and the target's logit together. The gradient needs nothing more.
"""

from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from muster.pipe.tensor.region import Region, outside_graph

IGNORED: Final = -100  # as torch.nn.functional.cross_entropy has it


class SplitCrossEntropy:
    """The mean cross-entropy of logits (..., classes of this rank), or of whole ones, against targets (...).

    In float32 at least; the same bits on every rank. Rows whose target is -100 do not count.

    Raises:
        ValueError: the logits have another number of classes; or on a CPU, a target is no class.
    """

    def __init__(self, region: Region, classes: int) -> None:
        self.region = region
        self.classes = classes

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss, a scalar."""
        # (rows, classes of this rank), (rows,)
        flat, wanted = logits.reshape(-1, logits.shape[-1]), targets.flatten()
        wide = torch.promote_types(flat.dtype, torch.float32)
        require_within(wanted, self.classes, "target", spared=IGNORED)
        if flat.shape[-1] == self.classes:
            return functional.cross_entropy(flat.to(wide), wanted)
        start, stop = self.region.share(self.classes)
        if flat.shape[-1] != stop - start:
            raise ValueError(
                f"cross-entropy over {self.classes} classes on {self.region.ranks} ranks: logits have "
                f"{flat.shape[-1]} of them; wanted this rank's {stop - start}, or all"
            )
        loss: Tensor = outside_graph(_SplitLoss.apply, self.region, flat, wanted, start, wide)
        return loss


def require_within(index: Tensor, size: int, what: str, spared: int = 0) -> None:
    """Check that indices are below a size. On a GPU the host would have to wait for them: nothing is checked.

    Raises:
        ValueError: one is not.
    """
    if index.device.type != "cpu" or not index.numel():
        return
    wrong = ((index < 0) | (index >= size)) & (index != spared)
    if wrong.any():
        raise ValueError(f"{what} {int(index[wrong][0])} is not below the vocabulary of {size}, nor 0 or more")


class _SplitLoss(torch.autograd.Function):
    """Logits (rows, classes of this rank, of which the first is `start`), targets (rows,) to the mean loss."""

    @staticmethod
    def forward(ctx: Any, region: Region, logits: Tensor, targets: Tensor, start: int, wide: torch.dtype) -> Tensor:
        largest = region.begin_maximum(logits.amax(-1).to(wide))()
        shifted = logits - largest[:, None]  # in the wider type; the only copy there is
        own = targets - start
        is_own = (own >= 0) & (own < logits.shape[-1])
        own = own.where(is_own, 0)[:, None]
        counts = (targets != IGNORED).to(wide)
        of_target = shifted.gather(-1, own)[:, 0] * is_own
        powers = shifted.exp_()
        sums, of_target = region.begin_sum(torch.stack([powers.sum(-1), of_target]))()
        count = counts.sum()
        ctx.region, ctx.dtype = region, logits.dtype
        shares = counts / count.clamp(min=1)  # without a target the mean is no number, and its gradient zeros
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
