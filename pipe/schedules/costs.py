"""Costs of a schedule's actions in seconds: per stage, and per message between two stages.

rank 0   F0 ─send─ F0 ─send─ ...              send: time until the sender can continue
            └──message───┐                    message: from the producer's end to the start of a waiting consumer
rank 1   . . . . . . . . F1  take F1          take: time to accept a message that has already arrived
"""

import math
from dataclasses import dataclass

from muster.pipe.schedules.actions import Action

Seconds = float | tuple[float, ...]
NAMES = ("forward", "input_gradient", "weight_gradient", "message", "send", "take")


@dataclass(frozen=True)
class Costs:
    """Seconds of every kind of action: one number for all stages, or one per stage.

    A whole backward (B) costs `input_gradient` plus `weight_gradient`. `message` is one number for all messages, or one
    per cut: `message[cut]` applies between stages `cut` and `cut + 1`, to activations and gradients. `send` is the time
    a rank needs to hand a message over before it can continue; `take` is the time to accept one that has arrived. With
    the defaults, a backward takes as long as two forwards and messages are free, as in the formulas of `tables.py`.

    Raises:
        ValueError: If a number is negative, infinite or NaN.
    """

    forward: Seconds = 1.0
    input_gradient: Seconds = 1.0
    weight_gradient: Seconds = 1.0
    message: Seconds = 0.0
    send: Seconds = 0.0
    take: Seconds = 0.0

    def __post_init__(self) -> None:
        """Check that all numbers are valid times."""
        for name in NAMES:
            value = getattr(self, name)
            for seconds in value if isinstance(value, tuple) else (value,):
                if not (math.isfinite(seconds) and seconds >= 0):
                    raise ValueError(f"costs: {name} must be finite seconds of 0 or more, got {seconds}")

    def of(self, action: Action) -> float:
        """Return the seconds of an action."""
        if action.kind == "F":
            return _at(self.forward, action.stage)
        if action.kind == "I":
            return _at(self.input_gradient, action.stage)
        if action.kind == "W":
            return _at(self.weight_gradient, action.stage)
        return _at(self.input_gradient, action.stage) + _at(self.weight_gradient, action.stage)

    def between(self, stage: int, other: int) -> float:
        """Return the seconds of a message between two adjacent stages, in either direction."""
        return _at(self.message, min(stage, other))

    def sending(self, stage: int) -> float:
        """Return the seconds that a stage's rank needs to send the stage's output."""
        return _at(self.send, stage)

    def taking(self, stage: int) -> float:
        """Return the seconds that a stage's rank needs to accept a message that has arrived."""
        return _at(self.take, stage)

    def require(self, stages: int) -> None:
        """Raise ValueError if the number of costs per stage or per cut does not match the number of stages."""
        for name in NAMES:
            value = getattr(self, name)
            wanted = stages - 1 if name == "message" else stages
            if isinstance(value, tuple) and len(value) != wanted:
                whose = "cuts" if name == "message" else "stages"
                raise ValueError(
                    f"costs: {name} has {len(value)} numbers, expected {wanted}, one for each of the {whose}"
                )


def _at(value: Seconds, index: int) -> float:
    return value[index] if isinstance(value, tuple) else value
