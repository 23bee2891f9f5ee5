"""The anatomy of a model that a user's function makes: counted where it can be built, read here without torch.

`jobs/train/memory/count.py` builds the model without memory for its numbers and writes the record that `read` reads:

    parts    every module in the order in which the forward leaves it, and what a module computes between its children
    layers   children of an `nn.Sequential`, or those of stages(): pipelines are cut between them
    units    as `jobs/train/models/units.py` finds them: what zero3 gathers together
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import Any

from muster.jobs.models.anatomy import Again, Anatomy, Part, TensorShape


@dataclass(frozen=True)
class CountedTensor(TensorShape):
    """A parameter; `cut` is the dimension in which tensor ranks split it (None: whole on each)."""

    cut: int | None = None

    def share(self, ranks: int) -> "CountedTensor":
        """Return the part of one tensor rank."""
        if self.cut is None:
            return self
        shape = list(self.shape)
        shape[self.cut] = -(-shape[self.cut] // ranks)
        return replace(self, shape=tuple(shape))


@dataclass(frozen=True)
class CountedPart(Part):
    """One module, or what it computes between its children; `flops` of the last part of a layer are the layer's."""

    unit: str = ""  # "" if it belongs to no unit
    shared: tuple[CountedTensor, ...] = ()  # parameters that it uses and another part owns
    keeps_input: bool = False  # what its layer keeps for the backward has the layer's input in it
    splits_kept: bool = False  # tensor ranks have a part each of what it keeps
    splits_outputs: bool = False  # and of what it hands on

    @property
    def backward_flops(self) -> int:
        """Work of the backward, which is counted with the forward's."""
        return 0


@dataclass(frozen=True)
class CountedAnatomy(Anatomy):
    """A made model; `blocks` is the number of its units."""

    def units(self) -> list[tuple[Part, ...]]:
        """List what lies around all units, and then each unit; without units, all parts as one."""
        by_unit: dict[str, list[Part]] = {"": []}
        for part in self.parts:
            assert isinstance(part, CountedPart)
            by_unit.setdefault(part.unit, []).append(part)
        if not self.blocks:
            return [self.parts]
        return [tuple(parts) for parts in by_unit.values()]

    def recomputed(self) -> list[Again]:
        """List the units, each with the outputs of the part before it."""
        inputs = {after.name: before.outputs for before, after in pairwise(self.parts)}
        return [Again(unit, inputs.get(unit[0].name, 0)) for unit in self.units()[1:] if unit]


@dataclass(frozen=True)
class Counted:
    """A made model's anatomy, and why some of it is unknown: each reason is empty where nothing is missing."""

    model: CountedAnatomy
    no_activations: str  # why the forward could not be followed; its parts then keep NaN bytes
    no_layers: str  # why pipelines cannot cut it
    no_plan: str  # why tensor ranks cannot split its layers

    def why_not(self, family: str) -> str:
        """Return why a family of modes does not work for it; empty if it does."""
        return {"pipe": self.no_layers, "tensor": self.no_plan}.get(family, "")


def read(record: Mapping[str, Any]) -> Counted:
    """Read what `count.py` wrote of a model."""
    parts = tuple(_part(each) for each in record["parts"])
    units = len([unit for unit, _ in groupby(part.unit for part in parts) if unit])
    model = CountedAnatomy(record["name"], parts, blocks=units)
    return Counted(model, record["no_activations"], record["no_layers"], record["no_plan"])


def _part(row: Mapping[str, Any]) -> CountedPart:
    saved = row["saved_bytes"]
    known = {key: row[key] for key in ("layer", "name", "flops", "outputs", "buffer_bytes", "unit")}
    flags = {key: row[key] for key in ("keeps_input", "splits_kept", "splits_outputs")}
    return CountedPart(
        **known,
        **flags,
        tensors=tuple(map(_tensor, row["tensors"])),
        shared=tuple(map(_tensor, row["shared"])),
        saved_bytes=math.nan if saved is None else saved,
    )


def _tensor(row: Mapping[str, Any]) -> CountedTensor:
    return CountedTensor(row["name"], tuple(row["shape"]), row["trained"], row["cut"])
