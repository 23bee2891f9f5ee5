"""The optimizer, the learning rate over steps, and gradient clipping."""

import math
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
import torch._dynamo  # building an optimizer imports it (0.8 s): here the warm process does so once for all ranks
from torch import Tensor, nn

from jobs.train_settings import OptimizerSettings, ScheduleSettings

FUSED_ON: Final = ("cuda", "cpu")


def _sgd(settings: OptimizerSettings) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    return torch.optim.SGD, {"momentum": settings.momentum, "nesterov": settings.nesterov}


def _adamw(settings: OptimizerSettings) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    return torch.optim.AdamW, {"betas": (settings.betas[0], settings.betas[1]), "eps": settings.eps}


OPTIMIZERS: Final = {"sgd": _sgd, "adamw": _adamw}


def build_optimizer(
    parameters: Iterable[nn.Parameter], settings: OptimizerSettings, *, capturable: bool = False
) -> torch.optim.Optimizer:
    """Build the job's optimizer over the trainable parameters, with one fused kernel where the device has it.

    With `capturable` a CUDA graph may hold its step: the learning rate is a tensor on the device.
    """
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    kind, options = OPTIMIZERS[settings.name](settings)
    fused = all(p.device.type in FUSED_ON and p.is_floating_point() for p in trainable)
    lr: float | Tensor = settings.lr
    if capturable and trainable:
        lr = torch.tensor(settings.lr, dtype=torch.float32, device=trainable[0].device)
        options |= {"capturable": True} if settings.name == "adamw" else {}
    optimizer = kind(trainable, lr=lr, weight_decay=settings.weight_decay, fused=fused, **options)  # type: ignore[call-arg]
    for parameter in trainable:
        optimizer.state[parameter].update(STATE[settings.name](parameter, settings))
    return optimizer


def _sgd_state(parameter: Tensor, settings: OptimizerSettings) -> dict[str, Tensor]:
    return {"momentum_buffer": torch.zeros_like(parameter)} if settings.momentum else {}


def _adamw_state(parameter: Tensor, settings: OptimizerSettings) -> dict[str, Tensor]:
    step = torch.zeros((), dtype=torch.float32, device=parameter.device)
    return {"step": step, "exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}


# What a first step would make. Made before it, a first step that loss scaling leaves out leaves something behind (the
# fused SGD would keep memory as it found it), and what a checkpoint or a graph fills stays where it is.
STATE: Final = {"sgd": _sgd_state, "adamw": _adamw_state}


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
    """Set every group's learning rate; one on a device is filled, without waiting for it."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(value)
        else:
            group["lr"] = value


def clip(parameters: list[nn.Parameter], norm: float) -> Tensor:
    """Scale all gradients so that their global 2-norm, in float32 at least, is at most `norm`; return that before."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if all(gradient.itemsize > 2 for gradient in gradients):
        return torch.nn.utils.clip_grad_norm_(parameters, norm)
    norms = torch._foreach_norm(gradients, 2.0, dtype=torch.float32)
    before: Tensor = torch.linalg.vector_norm(torch.stack(list(norms)))
    factor = torch.clamp(norm / (before + 1e-6), max=1.0)
    torch._foreach_mul_(gradients, factor)
    return before
