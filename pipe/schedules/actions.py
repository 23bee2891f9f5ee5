"""What ranks of a pipeline do, in which order: a schedule is a table of actions, one row a rank.

    1f1b, 4 stages, 4 micro-batches          F0.1: forward of micro-batch 1 on stage 0

    rank 0   F0.0 F0.1 F0.2 F0.3 B0.0 B0.1 B0.2 B0.3
    rank 3   F3.0 B3.0 F3.1 B3.1 F3.2 B3.2 F3.3 B3.3

A backward is one action B; or two, where a bubble is to be filled: I makes the gradient of a stage's input, which the
stage before waits for, W those of its weights, for which nobody waits (Qi et al. 2024, "Zero bubble pipeline
parallelism"). Stages are numbered from the model's input to its loss; a rank may have several.
"""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["F", "B", "I", "W"]


class ScheduleError(ValueError):
    """A schedule or a program that cannot run, or would give wrong gradients: says where, and with what numbers."""


@dataclass(frozen=True, order=True)
class Action:
    """One piece of work: a kind, on a stage, for a micro-batch."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.microbatch}"


@dataclass(frozen=True)
class Schedule:
    """Who does what in which order.

    `rank_of[stage]` is the rank that has a stage; `actions[rank]` what a rank does, first to last. A step is the whole
    table: weights are stepped after it, so all micro-batches see the same.
    """

    name: str
    microbatches: int
    rank_of: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]

    @property
    def ranks(self) -> int:
        """Ranks of the pipeline."""
        return len(self.actions)

    @property
    def stages(self) -> int:
        """Stages of the model."""
        return len(self.rank_of)

    @property
    def splits_backward(self) -> bool:
        """True when gradients of inputs and of weights are made at different times."""
        return any(action.kind == "I" for row in self.actions for action in row)
