"""Which class stores which kind of object."""

from collections.abc import Mapping

import torch
from torch import nn

from muster.jobs.session.modules import ModuleState
from muster.jobs.session.objects import Registered, plain
from muster.jobs.session.optimizers import OptimizerState


def register(objects: Mapping[str, object]) -> dict[str, Registered]:
    """Return how each object is stored, in the order given.

    Raises:
        RefusedError: an object cannot be stored.
    """
    modules = {name: ModuleState(name, each) for name, each in objects.items() if isinstance(each, nn.Module)}
    found: dict[str, Registered] = {}
    for name, each in objects.items():
        if name in modules:
            found[name] = modules[name]
        elif isinstance(each, torch.optim.Optimizer) and is_plain(each):
            found[name] = OptimizerState(name, each, list(modules.values()))
        else:
            found[name] = plain(name, each)
    return found


def is_plain(optimizer: torch.optim.Optimizer) -> bool:
    """True for an optimizer whose state is saved and loaded by PyTorch's own methods."""
    kind, base = type(optimizer), torch.optim.Optimizer
    return kind.state_dict is base.state_dict and kind.load_state_dict is base.load_state_dict
