"""Steps that must not be taken, and loss scaling for fp16, which makes some of them.

In all precisions a step whose gradients are not all finite is left out: it changes neither weights nor the optimizer's
state. A loss that is not finite makes its gradients so.

fp16: gradients too small for 16 bits are lifted into their range, by a factor found on the way.

    loss * scale ─ backward ─ mean over ranks ─ / scale ─ all finite? ─ clip ─ step           yes, `GROWTH_STEPS` in a
                                                              └ no: the step is left out,      row: scale * 2
                                                                scale / 2

Infinity anywhere makes the mean infinite or not a number on every rank, so all ranks leave out the same steps without
a word; where the mean is shared out, they exchange one number. Scale and counter are tensors on the device: nothing
waits for them, a CUDA graph may hold all of it, and checkpoints carry them.
"""

from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from muster.jobs.train.numerics.optim import clip

Group = dist.ProcessGroup | None

START: Final = 2.0**16
GROWTH: Final = 2.0
BACKOFF: Final = 0.5
GROWTH_STEPS: Final = 2000
SCALE: Final = "scaling/scale"  # the names that a checkpoint has for them
GOOD_STEPS: Final = "scaling/good_steps"


class Scaler:
    """Scales nothing: what all precisions but fp16 need.

    `first_lost` is the number, from 1, of the first step with this scaler that was left out; 0: none. It stays on the
    device, as all that is decided here; on GPUs the host waits for none of it.
    """

    agrees = True  # False: a rank leaves out a step for gradients of its own, for others would have to wait to hear

    def __init__(self, device: torch.device, *, shows_skipped: bool = False) -> None:
        self.shows_skipped = shows_skipped
        self.found_inf = torch.zeros((), dtype=torch.float32, device=device)  # 1.0: the last step was left out
        self.first_lost = torch.zeros((), dtype=torch.int64, device=device)
        self._steps = torch.zeros((), dtype=torch.int64, device=device)

    def scaled(self, loss: Tensor) -> Tensor:
        """Return what the backward begins from: the loss, times 1, or times no number where it is not finite."""
        return loss * (loss.detach() * 0.0 + 1.0)

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        gradients: Sequence[Tensor],
        clip_norm: float | None,
        group: Group = None,
        *,
        exact: bool = False,
        counted: Sequence[Tensor] | None = None,
    ) -> None:
        """Unscale and clip the gradients, which are the mean over ranks by now, and step.

        Ranks of a `group` have the gradients together; with `exact` they clip by the same bits as one process.
        `counted` are those of them that no other rank counts; None: all.
        """
        self.unscale(gradients, group if self.agrees else None)
        if clip_norm is not None:
            clip(gradients, clip_norm, group, exact=exact, counted=counted)
        self.advance(optimizer)

    def unscale(self, gradients: Sequence[Tensor], group: Group = None) -> None:
        """Turn gradients of scaled losses into those of the losses; note if all are finite, on all ranks of a group."""
        self.found_inf.copy_(_is_lost(gradients, self.found_inf.device))
        if group is not None:
            dist.all_reduce(self.found_inf, op=dist.ReduceOp.MAX, group=group)

    def advance(self, optimizer: torch.optim.Optimizer) -> None:
        """Step with gradients that are unscaled, if all are finite."""
        self._step(optimizer)
        self._steps += 1
        self.first_lost += self._steps * ((self.first_lost == 0) & (self.found_inf != 0))

    def _step(self, optimizer: torch.optim.Optimizer) -> None:
        told: Any = getattr(optimizer, "inner", optimizer)  # of shared-out state, one inside steps
        if self.found_inf.is_cuda and told.defaults["fused"]:  # its kernels read this, and step or not
            told.grad_scale, told.found_inf = None, self.found_inf
            optimizer.step()
        elif not self.found_inf:
            optimizer.step()

    def factor(self) -> float:
        """Return what losses are multiplied by; waits for the device."""
        return 1.0

    def state(self) -> dict[str, Tensor]:
        """Return what a checkpoint must hold, by name; to be filled in place."""
        return {}

    def row(self) -> dict[str, Tensor]:
        """Return what the row of the step just done shows of it: copies of scalars."""
        return {"skipped": self.found_inf.clone()} if self.shows_skipped else {}


class LossScaler(Scaler):
    """Scales by a factor that doubles after many good steps and halves after a bad one."""

    def __init__(self, device: torch.device, *, start: float = START, growth_steps: int = GROWTH_STEPS) -> None:
        super().__init__(device)
        self.growth_steps = growth_steps
        self.scale = torch.full((), start, dtype=torch.float32, device=device)
        self.good_steps = torch.zeros((), dtype=torch.int32, device=device)

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the loss times the scale."""
        return super().scaled(loss) * self.scale

    def unscale(self, gradients: Sequence[Tensor], group: Group = None) -> None:
        """Divide the gradients by the scale, and note whether all are finite: on all ranks that share them out."""
        self.found_inf.zero_()
        if gradients:  # a share of few parameters may be empty
            torch._amp_foreach_non_finite_check_and_unscale_(list(gradients), self.found_inf, self.scale.reciprocal())
        if group is not None:
            dist.all_reduce(self.found_inf, op=dist.ReduceOp.MAX, group=group)

    def advance(self, optimizer: torch.optim.Optimizer) -> None:
        """Step if all gradients were finite, and adapt the scale: to leave out a step now and then is part of it."""
        self._step(optimizer)
        torch._amp_update_scale_(self.scale, self.good_steps, self.found_inf, GROWTH, BACKOFF, self.growth_steps)

    def factor(self) -> float:
        """Return the scale; waits for the device."""
        return float(self.scale)

    def state(self) -> dict[str, Tensor]:
        """Return scale and counter."""
        return {SCALE: self.scale, GOOD_STEPS: self.good_steps}

    def row(self) -> dict[str, Tensor]:
        """Return the scale of the next step, and whether this one was left out."""
        return {"loss_scale": self.scale.clone(), "skipped": self.found_inf.clone()}


def _is_lost(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """Tell whether an element is not finite, without waiting for a GPU."""
    whole = [each for each in gradients if each.numel()]
    lost = torch.zeros((), dtype=torch.bool, device=device)
    if device.type == "cpu":  # a sum takes a tenth of the time; one that is no number may have overflown
        doubtful = [each for each in whole if not each.sum().isfinite()]
        return lost.fill_(any(not each.isfinite().all() for each in doubtful))
    for dtype in {each.dtype for each in whole}:
        largest = torch._foreach_norm([each for each in whole if each.dtype == dtype], float("inf"))
        lost |= ~torch.stack(largest).isfinite().all()
    return lost
