"""Choose the `Registered` subclass that saves and restores each kind of object."""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn

from muster.jobs.basics.errors import RefusedError
from muster.jobs.session.state.modules import ModuleState, is_a
from muster.jobs.session.state.objects import Registered, plain
from muster.jobs.session.state.optimizers import OptimizerState
from muster.jobs.session.state.shards import ShardedModule, ShardedOptimizerState
from muster.jobs.session.state.stages import StagesState


def register(objects: Mapping[str, object]) -> dict[str, Registered]:
    """Wrap each object in the `Registered` subclass of its kind; keep the order.

    Raises:
        RefusedError: if an object cannot be stored.
    """
    modules = {name: module_state(name, each) for name, each in objects.items() if is_module(each)}
    found: dict[str, Registered] = {}
    for name, each in objects.items():
        if name in modules:
            found[name] = modules[name]
        elif is_a(each, "muster.zero.optimizer", "ShardedOptimizer"):
            found[name] = ShardedOptimizerState(name, cast(Any, each), list(modules.values()))
        elif isinstance(each, torch.optim.Optimizer) and is_plain(each):
            found[name] = OptimizerState(name, each, list(modules.values()))
        else:
            found[name] = plain(name, each)
    return found


def is_module(value: object) -> bool:
    """Return whether a value is a module or a pipeline."""
    return isinstance(value, nn.Module) or is_a(value, "muster.pipe.pipeline", "Pipeline")


def module_state(name: str, module: Any) -> ModuleState:
    """Wrap a module or pipeline in the `ModuleState` subclass of its kind.

    Raises:
        RefusedError: if the module cannot be stored.
    """
    if is_a(module, "muster.pipe.pipeline", "Pipeline"):
        return StagesState(name, module)
    if is_a(module, "muster.pipe.run", "StageLayers"):
        raise RefusedError(f"state: {name} is the module of a pipeline; register the Pipeline itself")
    if is_a(module, "muster.zero.sharded", "Sharded"):
        return ShardedModule(name, module)
    return ModuleState(name, module)


def is_plain(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if an optimizer does not override PyTorch's state_dict() and load_state_dict()."""
    kind, base = type(optimizer), torch.optim.Optimizer
    return kind.state_dict is base.state_dict and kind.load_state_dict is base.load_state_dict
