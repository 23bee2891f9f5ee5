"""Units: modules whose parameters are gathered and freed together. All other parameters form the root unit.

    embed | block1 | block2 | ... | norm | head          units: the blocks; root: embed, norm, head

A parameter shared by two units, such as a head tied to an embedding, belongs to the root, so that both can use it.

All ranks must run the same units in the same order, because each gather is a collective. A unit's autograd graph may be
connected to the rest only by tensors that its modules return or store as attributes: the unit's backward begins at
these tensors.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from torch import nn

Units = Sequence[nn.Module | Sequence[nn.Module]]
ROOT: Final = "the root unit"
_LISTS: Final = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True)
class Unit:
    """Modules that run one after the other (none for the root unit), and the parameters that only these modules use."""

    name: str
    modules: tuple[nn.Module, ...]
    parameters: tuple[tuple[str, nn.Parameter], ...]

    @property
    def is_root(self) -> bool:
        """True for the root unit, which is gathered first and kept through the step."""
        return not self.modules


def names_of(module: nn.Module, asked: Units | None) -> str:
    """Return the names of the requested units, for comparison between ranks."""
    if asked is None:
        return "default"
    names = {id(part): name for name, part in module.named_modules()}
    groups = [list(each) if isinstance(each, Sequence) else [each] for each in asked]
    return str(
        [[names.get(id(each), f"a {type(each).__name__} outside the module") for each in group] for group in groups]
    )


def units_of(module: nn.Module, asked: Units | None) -> list[Unit]:
    """Divide a module into units: the requested ones (`asked`), or by default its children. The root unit is the last
    one.

    Raises:
        ValueError: If a unit is not a part of the module, or two units overlap.
    """
    groups = [tuple(each) if isinstance(each, Sequence) else (each,) for each in asked or ()]
    if asked is None:
        groups = [(each,) for each in _children(module)]
    names = {id(part): name for name, part in module.named_modules()}
    owners: dict[int, list[int]] = {}
    seen: dict[int, int] = {}
    for number, group in enumerate(groups):
        for each in group:
            if id(each) not in names:
                raise ValueError(
                    f"units[{number}]: a {type(each).__name__} that is not a part of the module; pass parts of it"
                )
            if each is module:
                raise ValueError(f"units[{number}] is the module itself, which is the root unit; pass parts of it")
            if isinstance(each, (nn.ModuleList, nn.ModuleDict)):
                kind = type(each).__name__
                raise ValueError(
                    f"units[{number}] is {names[id(each)]!r}, a {kind}, which is never called; pass its parts"
                )
        for part in {id(part): part for each in group for part in each.modules()}.values():
            if id(part) in seen:
                raise ValueError(
                    f"units[{seen[id(part)]}] and units[{number}] both have {names[id(part)]!r}; put it into one unit"
                )
            seen[id(part)] = number
            for parameter in part.parameters(recurse=False):
                if number not in owners.setdefault(id(parameter), []):
                    owners[id(parameter)].append(number)
    for part in module.modules():
        if id(part) not in seen:  # the parameter is in no unit, so it belongs to the root
            for parameter in part.parameters(recurse=False):
                owners.setdefault(id(parameter), []).append(len(groups))
    named = list(module.named_parameters())
    unit_of = {key: numbers[0] if len(numbers) == 1 else len(groups) for key, numbers in owners.items()}
    units = [
        Unit(", ".join(names[id(each)] for each in group), group, _of(named, unit_of, number))
        for number, group in enumerate(groups)
    ]
    return [*(unit for unit in units if unit.parameters), Unit(ROOT, (), _of(named, unit_of, len(groups)))]


def _of(
    named: Sequence[tuple[str, nn.Parameter]], unit_of: dict[int, int], number: int
) -> tuple[tuple[str, nn.Parameter], ...]:
    return tuple((name, each) for name, each in named if unit_of[id(each)] == number)


def _children(module: nn.Module) -> list[nn.Module]:
    """List the children of a module. Lists and sequences are replaced by their own children."""
    children: list[nn.Module] = []
    for child in module.children():
        children += _children(child) if isinstance(child, _LISTS) else [child]
    return children
