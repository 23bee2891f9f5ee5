"""Weigh the micro-batches and ranks of a step by the targets that count (`pipe/weighing.py`).

    shard 0   F B  F B |   mean of the gradients   | count, targets: |  gradients, losses
    shard 1   F B  F B |   over the shards         | sums over ranks |  * targets / count ─ clip ─ step

Only a job with its own data or loss can have targets that do not count. All its ranks then exchange the two numbers
after every step's gradients, whatever the batch contains.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from muster.pipe.weighing import CountedLoss, factor_of, multiply, of_valid

if TYPE_CHECKING:
    from muster.jobs.spec.train import TrainSettings
    from muster.jobs.train.data.loading import MicroInput


class Weights:
    """The numbers of targets in a rank's step, and of those that count.

    `group` has the ranks with other samples. `ignores`: the loss is the job's cross-entropy, without targets of -100.
    A user's loss that returns a mean counts all targets.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None, *, ignores: bool) -> None:
        self.device = device
        self.group = group
        self.ignores = ignores
        self._numbers: list[Tensor] = []

    def begin(self) -> None:
        """Begin a step."""
        self._numbers = []

    def of_loss(self, loss: Tensor, targets: Tensor) -> CountedLoss:
        """Weigh a micro-batch's loss: a mean, or a packed `CountedLoss`."""
        if loss.dim():
            return CountedLoss(loss[0], loss[1].detach())
        if self.ignores:
            return of_valid(loss, targets)
        return CountedLoss(loss, torch.full((), targets.numel(), device=loss.device))

    def weighed(self, loss: Tensor, micro: "MicroInput") -> Tensor:
        """Return the loss from which a micro-batch's backward starts, and count its targets."""
        weighed = self.of_loss(loss, micro.targets)
        if micro.samples:
            valid = weighed.valid.to(self.device, torch.float64)
            self.add(torch.stack([valid, torch.full_like(valid, micro.targets.numel())]))
        return weighed.mean

    def add(self, numbers: Tensor) -> None:
        """Add the number of targets that count, and of all targets: (2,) float64."""
        self._numbers.append(numbers)

    def divide(self, gradients: Sequence[Tensor], losses: Sequence[Tensor]) -> list[Tensor]:
        """Divide the step's gradients, in place, by the targets that count; return the losses divided: a collective."""
        numbers = torch.zeros(2, dtype=torch.float64, device=self.device)
        for each in self._numbers:
            numbers += each
        if self.group is not None and dist.get_world_size(self.group) > 1:
            dist.all_reduce(numbers, group=self.group)
        factor = factor_of(*numbers)
        multiply(gradients, factor)
        return [loss * factor for loss in losses]


def weights_of(
    settings: "TrainSettings", device: torch.device, group: dist.ProcessGroup | None = None
) -> Weights | None:
    """Return the weights of a job's steps; None if all its targets count."""
    if settings.loss is None and settings.data.make is None:
        return None
    return Weights(device, group, ignores=settings.loss is None)


def own_mean(loss: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss of a micro-batch alone, given a mean or a packed `CountedLoss`."""
    return loss[0] * factor_of(loss[1].detach(), torch.full_like(loss[1], targets.numel())) if loss.dim() else loss
