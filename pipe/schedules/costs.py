"""What actions of a schedule cost: seconds per stage, and per message between two stages.

rank 0   F0 ─send─ F0 ─send─ ...                  of the sender's time: until it can go on
            └──message───┐                        from its maker's end to the consumer that waits for it
rank 1   . . . . . . . . F1  take F1              of the receiver's time: a message that is there already
"""

import math
from dataclasses import dataclass

from muster.pipe.schedules.actions import Action

Seconds = float | tuple[float, ...]
NAMES = ("forward", "input_gradient", "weight_gradient", "message", "send", "take")


@dataclass(frozen=True)
class Costs:
    """Seconds of every kind of action, one number for all stages or one a stage.

    A backward in one piece (B) costs `input_gradient` and `weight_gradient`. `message` is one number for all messages,
    or one a cut: `message[cut]` is what lies between stages `cut` and `cut + 1`, activation or gradient. `send` is what
    a stage's rank needs to let a message go, before it can do anything else, `take` to begin with one that has come.
    The numbers that nobody gives make a backward twice as long as a forward, and messages free: those of the formulas.

    Raises:
        ValueError: A number is negative, infinite or none at all.
    """

    forward: Seconds = 1.0
    input_gradient: Seconds = 1.0
    weight_gradient: Seconds = 1.0
    message: Seconds = 0.0
    send: Seconds = 0.0
    take: Seconds = 0.0

    def __post_init__(self) -> None:
        """Refuse what is no time."""
        for name in NAMES:
            value = getattr(self, name)
            for seconds in value if isinstance(value, tuple) else (value,):
                if not (math.isfinite(seconds) and seconds >= 0):
                    raise ValueError(f"costs: {name} must be seconds from 0 on, got {seconds}")

    def of(self, action: Action) -> float:
        """Return the seconds that an action takes."""
        if action.kind == "F":
            return _at(self.forward, action.stage)
        if action.kind == "I":
            return _at(self.input_gradient, action.stage)
        if action.kind == "W":
            return _at(self.weight_gradient, action.stage)
        return _at(self.input_gradient, action.stage) + _at(self.weight_gradient, action.stage)

    def between(self, stage: int, other: int) -> float:
        """Return the seconds of a message between two neighbouring stages, in either direction."""
        return _at(self.message, min(stage, other))

    def sending(self, stage: int) -> float:
        """Return the seconds that a stage's rank needs to send what the stage has made."""
        return _at(self.send, stage)

    def taking(self, stage: int) -> float:
        """Return the seconds that a stage's rank needs to take a message for it that is there."""
        return _at(self.take, stage)

    def require(self, stages: int) -> None:
        """Raise ValueError unless there is a number for every stage and every cut."""
        for name in NAMES:
            value = getattr(self, name)
            wanted = stages - 1 if name == "message" else stages
            if isinstance(value, tuple) and len(value) != wanted:
                whose = "cuts" if name == "message" else "stages"
                raise ValueError(
                    f"costs: {name} has {len(value)} numbers, wanted {wanted}, one for each of the {whose}"
                )


def _at(value: Seconds, index: int) -> float:
    return value[index] if isinstance(value, tuple) else value
