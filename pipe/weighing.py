"""Weigh micro-batches by the targets that count, when padding leaves some with fewer than others.

    micro-batch   sum of its losses / number of its targets, padding included       known before any other micro-batch
    batch         gradients * number of all targets / number of those that count    after the sums over micro-batches
                                                                                    and ranks

The result is the gradient of the mean over all targets that count, not of a mean of means. If every target counts, the
last factor is exactly 1, so the gradients keep their bits.
"""

from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

IGNORED: Final = -100  # the target that does not count, as in torch's cross_entropy
PAIR: Final = 2  # values: the sum of losses and the number of targets
HALF_BYTES: Final = 2  # of an element of 16 bits


class CountedLoss(NamedTuple):
    """The loss of a micro-batch: the sum of its losses over the number of all its targets; and how many count."""

    mean: Tensor
    valid: Tensor

    def packed(self) -> Tensor:
        """Return sum and count as one differentiable tensor of shape (2,), in float32 or wider."""
        mean = _wide(self.mean)
        return torch.stack([mean, self.valid.to(mean.dtype)])


def counted_loss(loss: Any, value: Any, targets: Tensor) -> CountedLoss | None:
    """Return what a loss function's value means for these targets; None if it is a mean over an unknown number of them.

    A function tells the number by returning (sum, count). torch's own mean cross-entropies need not.
    """
    if isinstance(value, CountedLoss):
        return value
    ignored = _ignored_by(loss)
    if ignored is None or targets.is_floating_point() or not isinstance(value, Tensor):
        return _from_pair(value, targets)
    return of_valid(value, targets, ignored)


def _ignored_by(loss: Any) -> int | None:
    """Return the target that one of torch's mean cross-entropies does not count; None for another loss."""
    if loss in (functional.cross_entropy, functional.nll_loss):
        return IGNORED
    is_plain = type(loss) in (nn.CrossEntropyLoss, nn.NLLLoss) and loss.reduction == "mean" and loss.weight is None
    return loss.ignore_index if is_plain else None


def _from_pair(pair: Any, targets: Tensor) -> CountedLoss | None:
    """Return the loss of a pair (sum, count); None if this is not such a pair of scalars."""
    if not isinstance(pair, tuple | list) or len(pair) != PAIR or not isinstance(pair[0], Tensor):
        return None
    total, count = pair
    if isinstance(count, int | float):
        count = torch.full((), count, dtype=torch.float64, device=total.device)  # not copied from the host
    if not isinstance(count, Tensor) or not total.numel() == count.numel() == 1 or not total.is_floating_point():
        return None
    return CountedLoss(_wide(total.reshape(())) / targets.numel(), count.detach().reshape(()).to(total.device))


def of_valid(mean: Tensor, targets: Tensor, ignored: int = IGNORED) -> CountedLoss:
    """Weigh the mean loss over the targets that are not ignored. It may be NaN if all are."""
    count = (targets != ignored).sum()
    mean = _wide(mean)
    share = count.to(mean.dtype) / targets.numel()
    return CountedLoss(torch.where(count > 0, mean, torch.zeros_like(mean)) * share, count)


def _wide(loss: Tensor) -> Tensor:
    return loss.to(torch.promote_types(loss.dtype, torch.float32))


def factor_of(count: Tensor, targets: Tensor) -> Tensor:
    """Return all targets over those that count, float64 scalars. Without any target that counts, sums are zero."""
    return targets / torch.where(count == 0, 1.0, count)


@torch.no_grad()
def multiply(tensors: Iterable[Tensor], factor: Tensor) -> None:
    """Multiply tensors in place by a scalar; on a GPU, without waiting for it."""
    if factor.device.type == "cpu" and factor == 1.0:
        return
    for each in tensors:
        if each.dtype.itemsize <= HALF_BYTES:  # a factor rounded to 16 bits would move all gradients alike
            each.copy_(each.float().mul_(factor.float()))
        else:
            each.mul_(factor.to(each.dtype))
