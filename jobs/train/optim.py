"""The optimizer, the learning rate over steps, and gradient clipping."""

import math
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
import torch._dynamo  # building an optimizer imports it (0.8 s): here the warm process does so once for all ranks
from torch import Tensor, nn

from jobs.spec import OptimizerSettings, ScheduleSettings

FUSED_ON: Final = ("cuda", "cpu")


def _sgd(settings: OptimizerSettings) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    return torch.optim.SGD, {"momentum": settings.momentum, "nesterov": settings.nesterov}


def _adamw(settings: OptimizerSettings) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    return torch.optim.AdamW, {"betas": (settings.betas[0], settings.betas[1]), "eps": settings.eps}


OPTIMIZERS: Final = {"sgd": _sgd, "adamw": _adamw}


def build_optimizer(parameters: Iterable[nn.Parameter], settings: OptimizerSettings) -> torch.optim.Optimizer:
    """Build the job's optimizer over the trainable parameters, with one fused kernel where the device has it."""
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    kind, options = OPTIMIZERS[settings.name](settings)
    fused = all(p.device.type in FUSED_ON and p.is_floating_point() for p in trainable)
    return kind(trainable, lr=settings.lr, weight_decay=settings.weight_decay, fused=fused, **options)  # type: ignore[call-arg]


def _constant(done: float) -> float:
    return 1.0


def _linear(done: float) -> float:
    return 1.0 - done


def _cosine(done: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * done))


SHAPES: Final[dict[str, Callable[[float], float]]] = {"constant": _constant, "linear": _linear, "cosine": _cosine}


def learning_rate(settings: ScheduleSettings, peak: float, step: int, steps: int) -> float:
    """Return the learning rate of a step, counted from 0, of `steps`.

    lr  peak      ____
                 /    \\__         warm-up of n steps reaches the peak at step n - 1,
        final   /        \\___     the last step of linear and cosine has peak * final
    """
    warmup = settings.warmup_steps
    if step < warmup:
        return peak * (step + 1) / warmup
    if settings.name == "constant":
        return peak
    span = steps - 1 - warmup
    done = min((step - warmup) / span, 1.0) if span > 0 else 0.0
    low = peak * settings.final
    return min(peak, low + (peak - low) * SHAPES[settings.name](done))  # rounding may pass the peak by a bit


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Set every group's learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = value


def clip(parameters: list[nn.Parameter], norm: float) -> Tensor:
    """Scale all gradients so that their global 2-norm is at most `norm`; return the norm before."""
    return torch.nn.utils.clip_grad_norm_(parameters, norm)
