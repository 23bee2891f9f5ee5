"""What a rank holds of a model, and what is asked of models before anything is sent."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from muster.pipe.schedules.actions import Schedule


class Held(nn.Module):
    """Layers under the names that they have in the whole model; whoever runs them knows their order."""

    def __init__(self, layers: Sequence[tuple[str, nn.Module]]) -> None:
        super().__init__()
        for name, layer in layers:
            self.add_module(name, layer)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the forward of each layer by itself, as `nn.Module.compile` does: it is layers that stages run."""
        for layer in self.children():
            layer.compile(*args, **kwargs)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Refuse another layer: the stages would go on with the first one."""
        if name in self._modules:
            raise AttributeError(f"layer {name!r} of a pipeline stays; change it before the Pipeline is built")
        super().add_module(name, module)

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse another layer here, too."""
        if name in self.__dict__.get("_modules", ()):
            raise AttributeError(f"layer {name!r} of a pipeline stays; change it before the Pipeline is built")
        super().__setattr__(name, value)


def check_model(
    layers: nn.Sequential,
    process_group: dist.ProcessGroup | None,
    schedule: Schedule,
    loss: Callable[..., Any],
    *,
    layerwise: bool,
    recompute: bool,
) -> None:
    """Refuse what cannot be a pipeline, before anything is sent."""
    if not isinstance(layers, nn.Sequential):
        raise TypeError(f"a pipeline is cut from the layers of an nn.Sequential, got a {type(layers).__name__}")
    ranks = dist.get_world_size(process_group) if dist.is_initialized() else 1
    if schedule.ranks != ranks:
        raise ValueError(f"schedule {schedule.name} is for {schedule.ranks} ranks, the group has {ranks}")
    if layerwise and recompute:
        raise ValueError("layerwise and recompute: layerwise forwards every layer again anyway; drop one of the two")
    if layerwise and isinstance(loss, nn.Module) and any(each.requires_grad for each in loss.parameters()):
        raise ValueError(
            "layerwise: the loss has parameters that learn, and only layers' get gradients; move them into the last "
            "layer, or leave layerwise out"
        )
    of_layers = {id(each) for layer in layers for each in (*layer.parameters(), *layer.buffers())}
    for name, each in (*layers.named_parameters(), *layers.named_buffers()):
        if id(each) not in of_layers:
            raise ValueError(f"{name} belongs to no layer, so to no stage; move it into one")


def device_of(*modules: nn.Module) -> torch.device:
    """Return where the first of some modules that has a parameter or buffer is."""
    held = (each for module in modules for each in (*module.parameters(), *module.buffers()))
    first = next(held, None)
    return torch.device("cpu") if first is None else first.device


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put a module into evaluation mode, and each of its parts back into what it was in."""
    modes = [(each, each.training) for each in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for each, training in modes:
            each.training = training
