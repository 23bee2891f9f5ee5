"""What a rank holds of a model, and what is asked of models and batches before anything is sent."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipe.schedules.actions import Schedule


class Held(nn.Module):
    """Layers under the names that they have in the whole model; whoever runs them knows their order."""

    def __init__(self, layers: Sequence[tuple[str, nn.Module]]) -> None:
        super().__init__()
        for name, layer in layers:
            self.add_module(name, layer)

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse another layer: the stages would go on with the first one."""
        if name in self.__dict__.get("_modules", ()):
            raise AttributeError(f"layer {name!r} of a pipeline stays; change it before the Pipeline is built")
        super().__setattr__(name, value)


def check_model(
    layers: nn.Sequential,
    process_group: dist.ProcessGroup | None,
    schedule: Schedule,
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
    of_layers = {id(each) for layer in layers for each in (*layer.parameters(), *layer.buffers())}
    for name, each in (*layers.named_parameters(), *layers.named_buffers()):
        if id(each) not in of_layers:
            raise ValueError(f"{name} belongs to no layer, so to no stage; move it into one")


def check_batch(inputs: Tensor, targets: Tensor | None, *, evaluates: bool) -> None:
    """Refuse what no step can be made of."""
    for what, each in (("inputs", inputs), ("targets", inputs if evaluates else targets)):
        if not isinstance(each, Tensor):
            raise TypeError(f"{what} are a {type(each).__name__}, wanted one tensor, samples first")
    if not inputs.dim() or not len(inputs):
        raise ValueError("a batch of 0 samples; pass one at least")
    if targets is not None and len(targets) != len(inputs):
        raise ValueError(f"{len(inputs)} inputs but {len(targets)} targets; pass one for each")
    if inputs.requires_grad:
        raise ValueError("inputs require a gradient, which would reach no rank's; pass inputs.detach()")
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            "a pipeline within torch.inference_mode(): call it outside; evaluate() records nothing anyway"
        )


def device_of(*modules: nn.Module) -> torch.device:
    """Return where the first of some modules that has a parameter or buffer is."""
    held = (each for module in modules for each in (*module.parameters(), *module.buffers()))
    first = next(held, None)
    return torch.device("cpu") if first is None else first.device
