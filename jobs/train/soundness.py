"""End the attempt if losses, gradients or weights are not finite, because its state would be worthless.

A step whose loss or gradients are not finite is discarded (`numerics/scaling.py`), and the attempt fails there. The
next attempt resumes from the last valid checkpoint, in case the cause was a transient fault; the same failure at the
same step twice ends the run. With `non_finite: skip` training continues, until no loss was finite for several log
points.

    step          3: nan      4        5
    the GPU       discarded   begun
    the host                  ends it          on CPUs: in step 3, after a log point

Stages of a pipeline decide separately, unless they exchange a norm anyway: to agree, all would have to wait for the
last one in every step. A stage with non-finite values ends the attempt, and nothing more is saved. In fp16, discarding
steps is part of the search for a loss scale; a non-finite loss ends the attempt at a log point.
"""

import math
from collections.abc import Sequence
from typing import Final, NoReturn

import torch
from torch import Tensor

from muster.jobs.basics.errors import MusterError
from muster.jobs.train.engine import Engine
from muster.jobs.train.numerics.scaling import Scaler
from muster.jobs.train.parallel.forms import MODEL
from muster.jobs.world.world import World

LOG_POINTS: Final = 3  # number of consecutive log points without any finite loss after which training ends
ADVICE: Final = "lower train.optimizer.lr, or set train.clip_norm"


class NotFiniteError(MusterError):
    """An error: losses or weights are not finite."""


class Soundness:
    """A tracker of discarded steps, and of the losses at log points, which are the same on all ranks.

    `first_lost` is the number of the first discarded step, counted from 1 after `done` steps, or 0. On a GPU it is
    copied to the host asynchronously after every step, so the host sees it one or more steps later.
    """

    def __init__(self, first_lost: Tensor, done: int = 0, *, stops: bool = True) -> None:
        self.stops = stops
        self._first_lost, self._done = first_lost, done
        self._told = torch.zeros_like(first_lost, device="cpu", pin_memory=True) if first_lost.is_cuda else first_lost
        self._since: int | None = None  # the first of the recent steps with non-finite losses
        self._points = 0

    def is_lost(self) -> bool:
        """Return True if a step is known to have been discarded, so that training should stop.

        Called after each step.
        """
        if self._told is not self._first_lost:
            self._told.copy_(self._first_lost, non_blocking=True)
        return self.stops and bool(self._told)

    def is_known_to_all(self, world: World, scaler: Scaler) -> bool:
        """Return True if all ranks notice a discarded step after the same step, so that they can run a log point."""
        return world.size == 1 or (scaler.agrees and world.device.type == "cpu")

    def end(self, step: int = 0) -> NoReturn:
        """End training because of the first discarded step, or `step` if that is earlier.

        Raises:
            NotFiniteError: always.
        """
        known = [each for each in (self._done + int(self._told) if self._told else 0, step) if each]
        raise NotFiniteError(f"loss or gradients are not finite at step {min(known)}: {ADVICE}")

    def hear(self, losses: Sequence[tuple[int, float]]) -> None:
        """Process the (step, loss) pairs of all steps since the last log point.

        Raises:
            NotFiniteError: if a step was discarded or a loss is not finite; with `non_finite: skip` only if no loss was
                finite for several log points in a row.
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
        NotFiniteError: on every rank, if a parameter of any rank has a non-finite element.
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
        # All ranks report the same `first`, so that their messages agree.
        where = names[first].removeprefix(MODEL)
        raise NotFiniteError(f"weights are not finite after step {done}, first {where}: {ADVICE}")
