"""The optimizer, the learning rate over steps, and gradient clipping."""

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
import torch._dynamo  # building an optimizer imports it (0.8 s): here the warm process does so once for all ranks
import torch.distributed as dist
from torch import Tensor, nn

from muster.ddp.norms import clip_by, plain_norm, reproducible_norm
from muster.jobs.basics.errors import RefusedError
from muster.jobs.user import code

if TYPE_CHECKING:
    from muster.jobs.spec.train_fields import OptimizerSettings, ScheduleSettings

FUSED_ON: Final = ("cuda", "cpu")
FUSED_ALIKE: Final = ("cuda",)  # where fused kernels treat all elements alike


def _sgd(settings: "OptimizerSettings") -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    return torch.optim.SGD, {"momentum": settings.momentum, "nesterov": settings.nesterov}


def _adamw(settings: "OptimizerSettings") -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    return torch.optim.AdamW, {"betas": (settings.betas[0], settings.betas[1]), "eps": settings.eps}


OPTIMIZERS: Final = {"sgd": _sgd, "adamw": _adamw}


def build_optimizer(
    parameters: Iterable[nn.Parameter],
    settings: "OptimizerSettings",
    *,
    capturable: bool = False,
    cut_anywhere: bool = False,
) -> torch.optim.Optimizer:
    """Build the job's optimizer over the trainable parameters, with its state.

    With `capturable` a CUDA graph may hold its step: the learning rate is a tensor on the device.
    """
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    kind, options = recipe(trainable, settings, cut_anywhere=cut_anywhere)
    if capturable and trainable:
        options["lr"] = torch.tensor(settings.lr, dtype=torch.float32, device=trainable[0].device)
        options |= {"capturable": True} if settings.name == "adamw" else {}
    optimizer = kind([{"params": trainable}], **options)  # a slice of a model may have none
    make_state(optimizer, settings)
    return optimizer


def recipe(
    trainable: Sequence[nn.Parameter], settings: "OptimizerSettings", *, cut_anywhere: bool = False
) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Return the job's optimizer as a class and its options; fused into one kernel where the device has it.

    With `cut_anywhere` an element's bits do not depend on where in a tensor it lies, so that parameters may be shared
    out. Fused kernels of CPUs round the end of a tensor, which fills no vector, in another way than the rest.
    """
    if settings.make is not None:
        return made_optimizer(settings.make), {"lr": settings.lr, **settings.args}
    kind, options = OPTIMIZERS[settings.name](settings)
    fused_on = FUSED_ALIKE if cut_anywhere else FUSED_ON
    fused = all(p.device.type in fused_on and p.is_floating_point() for p in trainable)
    return kind, {"lr": settings.lr, "weight_decay": settings.weight_decay, "fused": fused, **options}


def made_optimizer(text: str) -> type[torch.optim.Optimizer]:
    """Return the user's class of optimizers.

    Raises:
        RefusedError: it cannot be imported, or is no such class.
    """
    kind = code.load("train.optimizer.make", text, Path.cwd())
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise RefusedError(f"train.optimizer.make: {text} is no class of torch.optim.Optimizer; name one")
    return kind


def make_state(optimizer: torch.optim.Optimizer, settings: "OptimizerSettings") -> None:
    """Make what a first step would, for all that the optimizer steps; a user's optimizer makes its own then."""
    if settings.make is not None:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter].update(STATE[settings.name](parameter, settings))


def _sgd_state(parameter: Tensor, settings: "OptimizerSettings") -> dict[str, Tensor]:
    return {"momentum_buffer": torch.zeros_like(parameter)} if settings.momentum else {}


def _adamw_state(parameter: Tensor, settings: "OptimizerSettings") -> dict[str, Tensor]:
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


def learning_rate(settings: "ScheduleSettings", peak: float, step: int, steps: int) -> float:
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


def gradients_of(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """List the gradients that are there."""
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def gradient_of(parameter: Tensor) -> Tensor:
    """Return a parameter's gradient; zeros where there is none."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def named_gradients(module: nn.Module) -> dict[str, Tensor]:
    """Copy the gradients, by name of parameter."""
    return {name: gradient_of(each).clone() for name, each in module.named_parameters() if each.requires_grad}


def clip(
    gradients: Sequence[Tensor],
    most: float,
    group: dist.ProcessGroup | None = None,
    *,
    exact: bool = False,
    counted: Sequence[Tensor] | None = None,
) -> Tensor:
    """Scale gradients so that their global 2-norm is at most `most`; return that before.

    Ranks of a `group` have one gradient together: a collective. `exact` gives the same bits whoever has which part.
    `counted` are those of them that no other rank counts; None: all.
    """
    norm_of = reproducible_norm if exact else plain_norm
    norm = norm_of(gradients if counted is None else counted, group, reduce=group is not None)
    clip_by(gradients, norm, most)
    return norm
