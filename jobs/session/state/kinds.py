"""Choose the class that stores each kind of object."""

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
    """Return the storage class of each object, in the given order.

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
    """Return the storage class of a module.

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
    """True for an optimizer whose state is saved and loaded by PyTorch's own methods."""
    kind, base = type(optimizer), torch.optim.Optimizer
    return kind.state_dict is base.state_dict and kind.load_state_dict is base.load_state_dict
