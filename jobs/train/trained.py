"""Completed steps, and how the ranks share those that they had not reported together when they lost a rank.

    attempt 0   log point ─ step 11 ─ step 12 ─ step 13 x      rank 2 is lost, and with it the losses of its samples
    attempt 1   step 14 ─ log point: rank 0 first writes rows of 11 to 13, with the losses of the samples that are left

The first log point of an attempt in place exchanges them, so that this does not delay the first step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from muster.jobs.train.data.sampling import GlobalBatch
from muster.jobs.train.profiling.clock import StepTimes
from muster.jobs.world.world import World, add_in_order


@dataclass(frozen=True)
class TrainedStep:
    """One completed step. `losses` has the sum of losses of each of this rank's virtual ranks."""

    batch: GlobalBatch
    losses: list[Tensor]
    samples: int
    lr: float
    time: float
    profile: str | None = None  # "warm-up", "recorded" or "written", if the profiler was active
    figures: Mapping[str, Tensor] = field(default_factory=dict)  # additional columns: scalars

    @property
    def number(self) -> int:
        """The step counted from 1, as in rows."""
        return self.batch.step + 1


@dataclass(frozen=True)
class CarriedStep:
    """A completed step of an earlier attempt."""

    attempt: int
    step: TrainedStep
    times: StepTimes

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
