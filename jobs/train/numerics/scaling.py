"""Skip steps with non-finite gradients, and scale losses for fp16, where such steps are normal.

In all precisions a step with any non-finite gradient is skipped: it changes neither the weights nor the optimizer
state. A non-finite loss makes its gradients non-finite.

fp16: a scale, adapted during training, lifts gradients that are too small for 16 bits into their range.

    loss * scale ─ backward ─ mean over ranks ─ / scale ─ all finite? ─ clip ─ step           `GROWTH_STEPS` times yes
                                                              └ no: skip the step,             in a row: scale * 2
                                                                scale / 2

Infinity on any rank makes the mean non-finite on every rank, so all ranks skip the same steps without communication. If
the mean is sharded, the ranks exchange one number. Scale and counter are tensors on the device, so the host does not
wait for them, and a CUDA graph can contain the whole step. Checkpoints save them.
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
SCALE: Final = "scaling/scale"  # name of the scale in a checkpoint
GOOD_STEPS: Final = "scaling/good_steps"


class Scaler:
    """The scaler of all precisions except fp16. Its scale is 1.

    `first_lost` is the number of the first step that this scaler skipped, counted from 1, or 0. It stays on the device,
    like the decision to skip a step, so that the host never waits for a GPU.
    """

    agrees = True  # False: each rank checks only its own gradients, because an exchange would make ranks wait

    def __init__(self, device: torch.device, *, shows_skipped: bool = False) -> None:
        self.shows_skipped = shows_skipped
        self.found_inf = torch.zeros((), dtype=torch.float32, device=device)  # 1.0: the last step was skipped
        self.first_lost = torch.zeros((), dtype=torch.int64, device=device)
        self._steps = torch.zeros((), dtype=torch.int64, device=device)

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the tensor at which the backward starts: the loss, or NaN if the loss is not finite."""
        return loss * (loss.detach() * 0.0 + 1.0)

    def prepare(
        self,
        gradients: Sequence[Tensor],
        clip_norm: float | None,
        group: Group = None,
        *,
        exact: bool = False,
        counted: Sequence[Tensor] | None = None,
    ) -> None:
        """Unscale and clip gradients that are already averaged over ranks. Call this before `advance`.

        Ranks of a `group` share the gradients, and this is a collective. With `exact`, clipped gradients have the same
        bits as in one process. `counted` lists the gradients that this rank adds to the norm (None: all).
        """
        self.unscale(gradients, group if self.agrees else None)
        if clip_norm is not None:
            clip(gradients, clip_norm, group, exact=exact, counted=counted)

    def unscale(self, gradients: Sequence[Tensor], group: Group = None) -> None:
        """Divide gradients by the loss scale, and record whether all are finite on all ranks of a group."""
        self.found_inf.copy_(_is_lost(gradients, self.found_inf.device))
        if group is not None:
            dist.all_reduce(self.found_inf, op=dist.ReduceOp.MAX, group=group)

    def advance(self, optimizer: torch.optim.Optimizer) -> None:
        """Step with unscaled gradients if all are finite."""
        self._step(optimizer)
        self._steps += 1
        self.first_lost += self._steps * ((self.first_lost == 0) & (self.found_inf != 0))

    def _step(self, optimizer: torch.optim.Optimizer) -> None:
        inner: Any = getattr(optimizer, "inner", optimizer)  # optimizers for shards or masters wrap an inner optimizer
        if self.found_inf.is_cuda and inner.defaults["fused"]:  # its kernels read found_inf and skip the step
            inner.grad_scale, inner.found_inf = None, self.found_inf
            optimizer.step()
        elif not self.found_inf:
            optimizer.step()

    def factor(self) -> float:
        """Return the loss scale; waits for the device."""
        return 1.0

    def state(self) -> dict[str, Tensor]:
        """Return the tensors for a checkpoint, by name; a restore fills them in place."""
        return {}

    def row(self) -> dict[str, Tensor]:
        """Return the scaler's columns for the metrics row of the last step, as copies of scalars."""
        return {"skipped": self.found_inf.clone()} if self.shows_skipped else {}


class LossScaler(Scaler):
    """The scaler of fp16. Its scale doubles after many good steps and halves after a skipped one."""

    def __init__(self, device: torch.device, *, start: float = START, growth_steps: int = GROWTH_STEPS) -> None:
        super().__init__(device)
        self.growth_steps = growth_steps
        self.scale = torch.full((), start, dtype=torch.float32, device=device)
        self.good_steps = torch.zeros((), dtype=torch.int32, device=device)

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the loss times the scale."""
        return super().scaled(loss) * self.scale

    def unscale(self, gradients: Sequence[Tensor], group: Group = None) -> None:
        """Divide the gradients by the scale, and record whether all are finite on all ranks that share them."""
        self.found_inf.zero_()
        if gradients:  # a shard of a small model may be empty
            torch._amp_foreach_non_finite_check_and_unscale_(list(gradients), self.found_inf, self.scale.reciprocal())
        if group is not None:
            dist.all_reduce(self.found_inf, op=dist.ReduceOp.MAX, group=group)

    def advance(self, optimizer: torch.optim.Optimizer) -> None:
        """Step if all gradients were finite, and adapt the scale. Skipping a step now and then is normal."""
        self._step(optimizer)
        torch._amp_update_scale_(self.scale, self.good_steps, self.found_inf, GROWTH, BACKOFF, self.growth_steps)

    def factor(self) -> float:
        """Return the scale; waits for the device."""
        return float(self.scale)

    def state(self) -> dict[str, Tensor]:
        """Return scale and counter."""
        return {SCALE: self.scale, GOOD_STEPS: self.good_steps}

    def row(self) -> dict[str, Tensor]:
        """Return the scale of the next step, and whether this one was skipped."""
        return {"loss_scale": self.scale.clone(), "skipped": self.found_inf.clone()}


def _is_lost(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return a scalar tensor, True if any element is not finite, without waiting for a GPU."""
    whole = [each for each in gradients if each.numel()]
    lost = torch.zeros((), dtype=torch.bool, device=device)
    if device.type == "cpu":  # a sum takes a tenth of the time; if it is not finite, it may only be an overflow
        doubtful = [each for each in whole if not each.sum().isfinite()]
        return lost.fill_(any(not each.isfinite().all() for each in doubtful))
    for dtype in {each.dtype for each in whole}:
        largest = torch._foreach_norm([each for each in whole if each.dtype == dtype], float("inf"))
        lost |= ~torch.stack(largest).isfinite().all()
    return lost
