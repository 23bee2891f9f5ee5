"""Which parameters belong to a unit, and which to the root."""

import re
from collections import OrderedDict

import pytest
from torch import nn

from muster.zero.units import ROOT, units_of


def model() -> nn.Module:
    """A list, a sequence of layers in it, a layer without parameters, and one tied to another."""
    made = nn.Module()
    made.embed = nn.Embedding(5, 4)
    made.all = nn.ModuleList([nn.Sequential(OrderedDict(up=nn.Linear(4, 6), act=nn.ReLU())), nn.Linear(6, 4)])
    made.head = nn.Linear(4, 5)
    made.head.weight = made.embed.weight
    made.scale = nn.Parameter(made.head.bias.detach().clone())
    return made


def shown(module: nn.Module, asked: list | None) -> dict[str, list[str]]:
    return {unit.name: [name for name, _ in unit.parameters] for unit in units_of(module, asked)}


def test_children_are_units_and_those_of_lists_one_by_one():
    assert shown(model(), None) == {
        "all.0.up": ["all.0.up.weight", "all.0.up.bias"],
        "all.1": ["all.1.weight", "all.1.bias"],
        "head": ["head.bias"],
        ROOT: ["scale", "embed.weight"],
    }


def test_what_is_in_no_unit_and_what_two_share_is_the_roots():
    made = model()
    assert shown(made, [(made.all[0], made.all[1]), made.head]) == {
        "all.0, all.1": ["all.0.up.weight", "all.0.up.bias", "all.1.weight", "all.1.bias"],
        "head": ["head.bias"],
        ROOT: ["scale", "embed.weight"],
    }
    assert shown(made, [(made.embed, made.head)]) == {
        "embed, head": ["embed.weight", "head.bias"],
        ROOT: ["scale", "all.0.up.weight", "all.0.up.bias", "all.1.weight", "all.1.bias"],
    }
    assert list(shown(made, [])) == [ROOT]


def test_units_that_cannot_be_are_refused_by_name():
    made = model()
    for asked, said in [
        ([nn.Linear(4, 4)], "units[0]: a Linear that is not a part of the module; pass parts of it"),
        ([made.head, made], "units[1] is the module itself, which is the root unit; pass parts of it"),
        ([made.all[0], made.all[0].up], "units[0] and units[1] both have 'all.0.up'; put it into one unit"),
        ([made.all], "units[0] is 'all', a ModuleList, which is never called; pass its parts"),
    ]:
        with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
            units_of(made, asked)
