"""The optimizer, the learning rate over steps, and gradient clipping."""

import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from muster.ddp.norms import clip_by, plain_norm, reproducible_norm
from muster.jobs.basics.errors import RefusedError
from muster.jobs.user import code

if TYPE_CHECKING:
    from muster.jobs.spec.train_fields import OptimizerSettings, ScheduleSettings

FUSED_ON: Final = ("cuda", "cpu")
FUSED_ALIKE: Final = ("cuda",)  # devices whose fused kernels round every element in the same way


# Methods that PyTorch excludes from compiled code. Before the first call, it imports the compiler to do so.
EXCLUDED: Final = ("add_param_group", "load_state_dict", "state_dict", "zero_grad")


def light(kind: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """Return a subclass of a PyTorch optimizer that does not import torch._dynamo: 900 modules, 2 s of CPU time.

    `step` imports it, too, to end compiled code there. The subclass has the function that PyTorch wraps for this.
    """
    for name in EXCLUDED:
        method = inspect.unwrap(getattr(torch.optim.Optimizer, name))
        method.__dynamo_disable = method  # where torch._compile keeps the excluded method
    return type(kind.__name__, (kind,), {"step": torch.no_grad()(inspect.unwrap(kind.step)), "elementwise": True})


SGD, ADAMW = light(torch.optim.SGD), light(torch.optim.AdamW)


def _sgd(settings: "OptimizerSettings") -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    return SGD, {"momentum": settings.momentum, "nesterov": settings.nesterov}


def _adamw(settings: "OptimizerSettings") -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    return ADAMW, {"betas": (settings.betas[0], settings.betas[1]), "eps": settings.eps}


OPTIMIZERS: Final = {"sgd": _sgd, "adamw": _adamw}


def build_optimizer(
    parameters: Iterable[nn.Parameter],
    settings: "OptimizerSettings",
    *,
    capturable: bool = False,
    cut_anywhere: bool = False,
) -> torch.optim.Optimizer:
    """Build the job's optimizer over the trainable parameters, with its state.

    With `capturable`, a CUDA graph can contain its step: the learning rate is a tensor on the device.
    """
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    kind, options = recipe(trainable, settings, cut_anywhere=cut_anywhere, capturable=capturable)
    optimizer = kind([{"params": trainable}], **options)  # a slice of a model may have no parameters
    make_state(optimizer, settings)
    quiet(optimizer)
    return optimizer


def quiet(optimizer: torch.optim.Optimizer) -> None:
    """Suppress PyTorch's warning that a capturable optimizer also steps outside of a graph: the first steps do."""
    optimizer._warned_capturable_if_run_uncaptured = True


def recipe(
    trainable: Sequence[nn.Parameter],
    settings: "OptimizerSettings",
    *,
    cut_anywhere: bool = False,
    capturable: bool = False,
) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Return the class and options of the job's optimizer; fused into one kernel if the device supports it.

    With `cut_anywhere`, the rounding of an element does not depend on its position in a tensor, so that parameters can
    be sharded. On CPUs, fused kernels lack this property: they compute the last elements, which do not fill a vector,
    differently.
    With `capturable`, a CUDA graph can contain the step: the learning rate is a tensor on the device.
    """
    if settings.make is not None:
        return made_optimizer(settings.make), {"lr": settings.lr, **settings.args}
    kind, options = OPTIMIZERS[settings.name](settings)
    fused_on = FUSED_ALIKE if cut_anywhere else FUSED_ON
    fused = all(p.device.type in fused_on and p.is_floating_point() for p in trainable)
    if capturable and settings.name == "adamw":
        options["capturable"] = True
    lr: Any = settings.lr
    if capturable and trainable:
        lr = torch.tensor(settings.lr, dtype=torch.float32, device=trainable[0].device)
    return kind, {"lr": lr, "weight_decay": settings.weight_decay, "fused": fused, **options}


def made_optimizer(text: str) -> type[torch.optim.Optimizer]:
    """Return the user's optimizer class.

    Raises:
        RefusedError: if it cannot be imported, or is not an optimizer class.
    """
    kind = code.load("train.optimizer.make", text, Path.cwd())
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise RefusedError(f"train.optimizer.make: {text} is not a subclass of torch.optim.Optimizer; name one")
    return kind


def make_state(optimizer: torch.optim.Optimizer, settings: "OptimizerSettings") -> None:
    """Create the optimizer state as a first step would. A user's optimizer creates its own in its first step."""
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


# Functions that create the optimizer's state before its first step, so that checkpoints and graphs can fill it in
# place. If the first step created the state but loss scaling skipped this step, the state would be bad (uninitialized
# memory in fused SGD).
STATE: Final = {"sgd": _sgd_state, "adamw": _adamw_state}


def _constant(done: float) -> float:
    return 1.0


def _linear(done: float) -> float:
    return 1.0 - done


def _cosine(done: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * done))


SHAPES: Final[dict[str, Callable[[float], float]]] = {"constant": _constant, "linear": _linear, "cosine": _cosine}


def learning_rate(settings: "ScheduleSettings", peak: float, step: int, steps: int) -> float:
    """Return the learning rate of step `step` of `steps`, counted from 0.

    lr  peak      ____
                 /    \\__         a warm-up of n steps reaches the peak at step n - 1,
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
    return min(peak, low + (peak - low) * SHAPES[settings.name](done))  # rounding may exceed the peak slightly


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Set every group's learning rate. A rate on a device is set without waiting for the device."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(value)
        else:
            group["lr"] = value


def gradients_of(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """List the existing gradients."""
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def gradient_of(parameter: Tensor) -> Tensor:
    """Return a parameter's gradient, or zeros if it has none."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def named_gradients(module: nn.Module) -> dict[str, Tensor]:
    """Copy the gradients, by parameter name."""
    return {name: gradient_of(each).clone() for name, each in module.named_parameters() if each.requires_grad}


def clip(
    gradients: Sequence[Tensor],
    most: float,
    group: dist.ProcessGroup | None = None,
    *,
    exact: bool = False,
    counted: Sequence[Tensor] | None = None,
) -> Tensor:
    """Scale gradients so that their global 2-norm is at most `most`; return the original norm.

    With a `group`, its ranks share the gradients, and this is a collective. With `exact`, the result has the same bits
    for any number of ranks. `counted` lists the gradients that this rank adds to the norm (None: all).
    """
    norm_of = reproducible_norm if exact else plain_norm
    norm = norm_of(gradients if counted is None else counted, group, reduce=group is not None)
    clip_by(gradients, norm, most)
    return norm
