"""Units: the modules of a model that are gathered and freed together if ranks shard its parameters.

    gpt    block1 | block2 | ...            gathered for the whole step: embed, norm, head
    vgg    conv1 norm1 | conv2 norm2 | ... | head
    made   modules named by `units:`; by default repeated children with parameters: two or more of one class in a
           ModuleList, ModuleDict or Sequential, or in any other module if they have children themselves

`jobs/models/anatomy.py` derives the units of gpt and vgg from their shapes; a test compares the two.
"""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import nn

from muster.jobs.basics.errors import RefusedError
from muster.jobs.train.models.gpt import TransformerBlock
from muster.pipe.tensor.plan import matches

if TYPE_CHECKING:
    from muster.jobs.spec.train_fields import ModelSettings

Unit = tuple[nn.Module, ...]
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def units_of(model: nn.Module, settings: "ModelSettings") -> list[Unit]:
    """List a model's units in the order of its forward. Each unit is a tuple of modules that run one after the other.

    Raises:
        RefusedError: if `units:` names no module with parameters, or one module within another.
    """
    if settings.make is None:
        return own_units(model)
    found = repeated(model) if settings.units is None else named_units(model, settings.units)
    return [(each,) for each in found]


def repeated(model: nn.Module) -> list[nn.Module]:
    """List the outermost repeated children of a model."""
    children = [child for child in model.children() if next(child.parameters(), None) is not None]
    kinds = Counter(type(child) for child in children)
    found: list[nn.Module] = []
    for child in children:
        is_unit = isinstance(model, CONTAINERS) or (any(child.children()) and not isinstance(child, CONTAINERS))
        found += [child] if is_unit and kinds[type(child)] > 1 else repeated(child)
    return found


def named_units(model: nn.Module, patterns: Sequence[str]) -> list[nn.Module]:
    """List the modules whose names match one of the patterns (`blocks.*`), in the model's order."""
    found: dict[str, nn.Module] = {}
    for pattern in patterns:
        matching = {name: module for name, module in model.named_modules() if matches(pattern, name)}
        if not any(next(each.parameters(), None) is not None for each in matching.values()):
            known = ", ".join(name for name, _ in model.named_children())
            raise RefusedError(f"train.model.units: {pattern!r} names no module with parameters; the model has {known}")
        found |= matching
    for name in found:
        if within := next((other for other in found if name.startswith(f"{other}.")), None):
            raise RefusedError(f"train.model.units: {name} is within {within}; name only one of them")
    return [each for name, each in model.named_modules() if name in found]


def own_units(model: nn.Module) -> list[Unit]:
    """List the units of a gpt or a vgg."""
    if any(isinstance(layer, TransformerBlock) for layer in model.children()):
        return [(layer,) for layer in model.children() if isinstance(layer, TransformerBlock)]
    units: list[Unit] = []
    for name, layer in model.named_children():
        if next(layer.parameters(), None) is None:
            continue
        if units and name.startswith("norm"):
            units[-1] += (layer,)
        else:
            units.append((layer,))
    return units


def of_one_dtype(unit: Unit) -> list[Unit]:
    """Cut a unit where the dtype of parameters changes. Within a module, all parameters must have the same dtype."""
    cut: list[Unit] = []
    for module in unit:
        if cut and _dtype(cut[-1][-1]) == _dtype(module):
            cut[-1] += (module,)
        else:
            cut.append((module,))
    return cut


def _dtype(module: nn.Module) -> object:
    return next(module.parameters()).dtype
