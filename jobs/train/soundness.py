"""Is what is trained still numbers? A training that has lost them is ended: what it would save is worth nothing.

A single loss that is no number may pass, as a step that fp16 leaves out does. Losses that are none for several log
points never come back: the weights are lost. The attempt fails then, and the next one begins from the last good
checkpoint, as a passing fault of the machine needs; the same failure at the same step twice ends the run.
"""

import math
from collections.abc import Sequence
from typing import Final

import torch

from jobs.train.engine import Engine
from jobs.train.state import MODEL
from jobs.train.world import World

LOG_POINTS: Final = 3  # in a row without a single loss that is a number
ADVICE: Final = "lower train.optimizer.lr, or set train.clip_norm"


class NotFiniteError(ArithmeticError):
    """Training has come to losses or weights that are no numbers."""


class Soundness:
    """Hears the losses of every log point, which are the same on all ranks."""

    def __init__(self) -> None:
        self._since: int | None = None  # the first step of those that were no numbers
        self._points = 0

    def hear(self, losses: Sequence[tuple[int, float]]) -> None:
        """Take the (step, loss) of all steps since the last log point.

        Raises:
            NotFiniteError: none was a number, for several log points in a row.
        """
        lost = self._since
        for step, loss in losses:
            lost = None if math.isfinite(loss) else step if lost is None else lost
        self._points = self._points + 1 if lost is not None and lost <= losses[0][0] else 0
        self._since = lost
        if self._points >= LOG_POINTS:
            raise NotFiniteError(f"loss is not finite since step {self._since}: {ADVICE}")


def require_finite(engine: Engine, world: World, done: int) -> None:
    """Check the parameters after `done` steps: a collective.

    Raises:
        NotFiniteError: on every rank, if one has a parameter with an element that is no number.
    """
    names = [piece.name for piece in engine.forms.pieces.values()]
    places = {name: place for place, name in enumerate(names)}
    broken = [
        places[part.piece.name]
        for part in engine.held_state()
        if part.piece.name in places and not bool(part.tensor.isfinite().all())
    ]
    mine = torch.tensor([min(broken, default=len(names))], device=world.device)
    if (first := min(int(each) for each in world.gather(mine))) < len(names):
        where = names[first].removeprefix(MODEL)  # the same on all ranks: the supervisor compares what failures say
        raise NotFiniteError(f"weights are not finite after step {done}, first {where}: {ADVICE}")
