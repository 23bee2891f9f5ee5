"""Actions of a pipeline and their order: a schedule is a table of actions with one row per rank.

    1f1b, 4 stages, 4 micro-batches          F0.1: forward of micro-batch 1 on stage 0

    rank 0   F0.0 F0.1 F0.2 F0.3 B0.0 B0.1 B0.2 B0.3
    rank 3   F3.0 B3.0 F3.1 B3.1 F3.2 B3.2 F3.3 B3.3

A backward is one action B. Schedules that fill their bubbles split a backward into I and W (Qi et al. 2024, "Zero
bubble pipeline parallelism"). I computes the gradient of a stage's input, which the previous stage waits for. W
computes the gradients of its weights, which no other rank waits for. Stages are numbered from the model's input to its
loss. A rank may have several stages.
"""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["F", "B", "I", "W"]


class ScheduleError(ValueError):
    """A schedule or program that cannot run, or would give wrong gradients.

    The message names the rank and the action.
    """


@dataclass(frozen=True, order=True)
class Action:
    """One unit of work: a kind of action, a stage, and a micro-batch (or a slice of one)."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.microbatch}"


@dataclass(frozen=True)
class Schedule:
    """The actions of every rank, in order.

    `rank_of[stage]` is the rank that holds a stage. `actions[rank]` lists a rank's actions, first to last. A step
    runs the whole table. The optimizer runs after it, so all micro-batches use the same weights.

    With `slices` above 1, sequences are cut into that many slices along their tokens. `microbatches` then counts all
    slices of all micro-batches: number u is slice u % slices of micro-batch u // slices.
    """

    name: str
    microbatches: int
    rank_of: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]
    slices: int = 1

    def backward_order(self, microbatches: int) -> list[int]:
        """Return the order of backwards on every stage: later slices first, because they read earlier ones."""
        begins = range(0, microbatches, self.slices)
        return [index for begin in begins for index in reversed(range(begin, begin + self.slices))]

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
