"""Actions of a pipeline and their order: a schedule is a table of actions with one row per rank.

    1f1b, 4 stages, 4 micro-batches          F0.1: forward of micro-batch 1 on stage 0

    rank 0   F0.0 F0.1 F0.2 F0.3 B0.0 B0.1 B0.2 B0.3
    rank 3   F3.0 B3.0 F3.1 B3.1 F3.2 B3.2 F3.3 B3.3

A backward is one action B, or two if a bubble is to be filled. I computes the gradient of a stage's input, which the
previous stage waits for. W computes the gradients of its weights, which no other rank waits for (Qi et al. 2024, "Zero
bubble pipeline parallelism"). Stages are numbered from the model's input to its loss. A rank may have several stages.
"""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["F", "B", "I", "W"]


class ScheduleError(ValueError):
    """A schedule or program cannot run, or would give wrong gradients. The message names the place and the numbers."""


@dataclass(frozen=True, order=True)
class Action:
    """One unit of work: a kind of action, a stage, and a micro-batch."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.microbatch}"


@dataclass(frozen=True)
class Schedule:
    """The actions of every rank, in order.

    `rank_of[stage]` is the rank that holds a stage. `actions[rank]` lists a rank's actions, first to last. A step is
    the whole table. The optimizer steps after it, so all micro-batches see the same weights.
    """

    name: str
    microbatches: int
    rank_of: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.actions)

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.rank_of)

    @property
    def splits_backward(self) -> bool:
        """True if gradients of inputs and of weights are computed at different times."""
        return any(action.kind == "I" for row in self.actions for action in row)
