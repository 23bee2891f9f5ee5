"""Programs: the actions of a schedule with the messages between them."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from muster.pipe.schedules.actions import Action, Schedule

What = Literal["activation", "gradient"]


Key = tuple[What, int, int]


@dataclass(frozen=True, order=True)
class _Message:
    """A send or a receive; `peer` is the rank at the other end."""

    what: What
    stage: int
    microbatch: int
    peer: int

    @property
    def key(self) -> Key:
        """The kind, stage and micro-batch of a message, which are the same at both ends."""
        return self.what, self.stage, self.microbatch


class Send(_Message):
    """A send of an activation or gradient of a micro-batch to `stage`, on rank `peer`."""

    def __str__(self) -> str:
        return f">{self.what[0]}{self.stage}.{self.microbatch}"


class Receive(_Message):
    """A receive of an activation or gradient of a micro-batch for this rank's `stage`, from rank `peer`."""

    def __str__(self) -> str:
        return f"<{self.what[0]}{self.stage}.{self.microbatch}"


Step = Action | Send | Receive


class StepSpan(NamedTuple):
    """Start and end of a step, in seconds of one clock: simulated, or the rank's own."""

    step: Step
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Program:
    """A schedule with its messages: the steps of every rank, first to last."""

    schedule: Schedule
    steps: tuple[tuple[Step, ...], ...]


def sent_after(action: Action, rank_of: tuple[int, ...]) -> Send | None:
    """Return the message with the result of an action; None if the next stage is on the same rank or does not exist."""
    what: What = "activation" if action.kind == "F" else "gradient"
    target = action.stage + (1 if action.kind == "F" else -1)
    if action.kind == "W" or not 0 <= target < len(rank_of) or rank_of[target] == rank_of[action.stage]:
        return None
    return Send(what, target, action.microbatch, rank_of[target])


def received_before(action: Action, rank_of: tuple[int, ...]) -> Receive | None:
    """Return the message with the input of an action; None if its input is computed on its own rank."""
    what: What = "activation" if action.kind == "F" else "gradient"
    source = action.stage + (-1 if action.kind == "F" else 1)
    if action.kind == "W" or not 0 <= source < len(rank_of) or rank_of[source] == rank_of[action.stage]:
        return None
    return Receive(what, action.stage, action.microbatch, rank_of[source])
