"""Steps that the ranks had completed, but not reported together, when they lost another rank.

    attempt 0   log point ─ step 11 ─ step 12 ─ step 13 x      rank 2 is lost, and with it the losses of its samples
    attempt 1   step 14 ─ log point: rank 0 first writes rows of 11 to 13, with the losses of the samples that are left

The first log point of an attempt in place exchanges them, so that this does not delay the first step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from muster.jobs.world.world import World, add_in_order

if TYPE_CHECKING:
    from muster.jobs.train.metrics import TrainedStep
    from muster.jobs.train.profiling.clock import StepTimes


@dataclass(frozen=True)
class CarriedStep:
    """A completed step of an earlier attempt."""

    attempt: int
    step: "TrainedStep"
    times: "StepTimes"

    @property
    def number(self) -> int:
        """The step counted from 1, as in rows."""
        return self.step.number


def gather_carried(world: World, carried: Sequence[CarriedStep]) -> dict[int, tuple[float, int]]:
    """Return the sum of the losses and the number of samples that are left, by step: a collective."""
    numbers = [each.number for each in carried]
    mine = torch.tensor([min(numbers, default=0), max(numbers, default=0)], device=world.device)
    ends = [each.tolist() for each in world.gather(mine)]
    first, last = min((low for low, _ in ends if low), default=1), max(high for _, high in ends)
    if last == 0:
        return {}
    table = torch.zeros(last - first + 1, 2, dtype=torch.float64, device=world.device)  # per step (losses, samples)
    for each in carried:
        table[each.number - first] = torch.tensor([add_in_order(map(float, each.step.losses)), each.step.samples])
    of_all = torch.stack(list(world.readers(world.gather(table)))).sum(0).tolist()
    return {number: (loss, int(samples)) for number, (loss, samples) in enumerate(of_all, first) if samples}
