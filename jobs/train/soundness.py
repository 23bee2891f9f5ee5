"""Is what is trained still numbers? A training that has lost them is ended: what it would save is worth nothing.

A step whose loss or gradients are not finite is left out (`numerics/scaling.py`), and the attempt fails there. The next
one begins from the last good checkpoint, as a passing fault of the machine needs; the same failure at the same step
twice ends the run. With `non_finite: skip` training goes on, until no loss has been a number for several log points.

    step          3: nan     4        5
    the GPU       left out   begun
    the host                 ends it           CPUs: in step 3, after a log point

Stages of a pipeline decide for themselves, unless they exchange a norm anyway: to agree, all would have to wait for the
last in every step. One that has lost its numbers ends the attempt, and nothing more is saved.
In fp16 a step that is left out is part of the search for a scale; a loss that is not finite ends it at a log point.
"""

import math
from collections.abc import Sequence
from typing import Final, NoReturn

import torch
from torch import Tensor

from muster.jobs.basics.errors import MusterError
from muster.jobs.train.engine import Engine
from muster.jobs.train.numerics.scaling import Scaler
from muster.jobs.train.parallel.state import MODEL
from muster.jobs.world.world import World

LOG_POINTS: Final = 3  # in a row without a single loss that is a number
ADVICE: Final = "lower train.optimizer.lr, or set train.clip_norm"


class NotFiniteError(MusterError):
    """Training has come to losses or weights that are no numbers."""


class Soundness:
    """Hears of every step whether it was left out, and of log points the losses, which are the same on all ranks.

    `first_lost` is the number of the first step that was left out, counted from 1 after `done` steps; 0: none. A GPU's
    is copied to the host after every step, and read when it has come: a step later, or some where the host is ahead.
    """

    def __init__(self, first_lost: Tensor, done: int = 0, *, stops: bool = True) -> None:
        self.stops = stops
        self._first_lost, self._done = first_lost, done
        self._told = torch.zeros_like(first_lost, device="cpu", pin_memory=True) if first_lost.is_cuda else first_lost
        self._since: int | None = None  # the first step of those whose losses were no numbers
        self._points = 0

    def is_lost(self) -> bool:
        """Say, after a step, whether one is known to have been left out; then training should stop."""
        if self._told is not self._first_lost:
            self._told.copy_(self._first_lost, non_blocking=True)
        return self.stops and bool(self._told)

    def is_known_to_all(self, world: World, scaler: Scaler) -> bool:
        """Say whether all ranks know of a lost step after the same step, so that they may meet once more."""
        return world.size == 1 or (scaler.agrees and world.device.type == "cpu")

    def end(self, step: int = 0) -> NoReturn:
        """End the training because of a step that was left out, or of an earlier one that is given.

        Raises:
            NotFiniteError: always.
        """
        known = [each for each in (self._done + int(self._told) if self._told else 0, step) if each]
        raise NotFiniteError(f"loss or gradients are not finite at step {min(known)}: {ADVICE}")

    def hear(self, losses: Sequence[tuple[int, float]]) -> None:
        """Take the (step, loss) of all steps since the last log point.

        Raises:
            NotFiniteError: a step was left out, or a loss is no number; unless these are skipped: no loss was a number
                for several log points in a row.
        """
        if self.stops:
            lost = next((step for step, loss in losses if not math.isfinite(loss)), 0)
            if lost or self._told:
                self.end(lost)
            return
        since = self._since
        for step, loss in losses:
            since = None if math.isfinite(loss) else step if since is None else since
        self._points = self._points + 1 if since is not None and since <= losses[0][0] else 0
        self._since = since
        if self._points >= LOG_POINTS:
            raise NotFiniteError(f"loss is not finite since step {self._since}: {ADVICE}")


def require_finite(engine: Engine, world: World, done: int) -> None:
    """Check the parameters after `done` steps: a collective.

    Raises:
        NotFiniteError: on every rank, if one has a parameter with an element that is no number.
    """
    names = [piece.name for piece in engine.model.whole.pieces.values()]
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
