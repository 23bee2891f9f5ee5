"""The anatomy of a user's model: counted in a process that can build the model, read here without torch.

`jobs/train/memory/count.py` builds the model on PyTorch's meta device and writes the record that `read` parses:

    parts    every module in the order in which its forward ends, and the computations between its children
    layers   the children of an `nn.Sequential`, or those of stages(); pipelines are cut between layers
    units    the modules that zero3 gathers together, found by `jobs/train/models/units.py`
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import Any

from muster.jobs.models.anatomy import Again, Anatomy, ModelOperation, TensorShape


@dataclass(frozen=True)
class CountedTensor(TensorShape):
    """A parameter. `cut` is the dimension along which tensor ranks split it; None if each rank has all of it."""

    cut: int | None = None

    def share(self, ranks: int) -> "CountedTensor":
        """Return the part of one tensor rank."""
        if self.cut is None:
            return self
        shape = list(self.shape)
        shape[self.cut] = -(-shape[self.cut] // ranks)
        return replace(self, shape=tuple(shape))


@dataclass(frozen=True)
class CountedPart(ModelOperation):
    """A module, or the computation between its children. The last part of a layer has the `flops` of the layer."""

    unit: str = ""  # the unit of the part; "" if it belongs to none
    shared: tuple[CountedTensor, ...] = ()  # parameters that it uses but another part owns
    keeps_input: bool = False  # the kept activations of its layer include the layer's input
    splits_kept: bool = False  # each tensor rank keeps only a part of its activations
    splits_outputs: bool = False  # each tensor rank has only a part of its outputs

    @property
    def backward_flops(self) -> int:
        """Always 0, because `flops` includes the work of the backward."""
        return 0

    @property
    def multiplies(self) -> bool:
        """Always true, because nothing else is counted in `flops`."""
        return True


@dataclass(frozen=True)
class CountedAnatomy(Anatomy):
    """A user's model; `blocks` is the number of its units."""

    def units(self) -> list[tuple[ModelOperation, ...]]:
        """List the parts around the units, then each unit. Without units, list all parts as one unit."""
        by_unit: dict[str, list[ModelOperation]] = {"": []}
        for part in self.parts:
            assert isinstance(part, CountedPart)
            by_unit.setdefault(part.unit, []).append(part)
        if not self.blocks:
            return [self.parts]
        return [tuple(parts) for parts in by_unit.values()]

    def ready(self) -> list[tuple[TensorShape, float]]:
        """List the trained parameters in the order in which gradients are ready, by the work of the layers so far."""
        total = sum(part.flops for part in self.parts)
        done, order = 0.0, list[tuple[TensorShape, float]]()
        for number, part in enumerate(reversed(self.parts), 1):
            done += part.flops
            share = done / total if total else number / len(self.parts)
            order += [(tensor, share) for tensor in reversed(part.tensors) if tensor.trained]
        return order

    def recomputed(self) -> list[Again]:
        """List the units, each with the number of output elements of the part before it."""
        inputs = {after.name: before.outputs for before, after in pairwise(self.parts)}
        return [Again(unit, inputs.get(unit[0].name, 0)) for unit in self.units()[1:] if unit]


@dataclass(frozen=True)
class Counted:
    """The anatomy of a user's model, with the reasons why parts of it are unknown; empty if all is known."""

    model: CountedAnatomy
    no_activations: str  # why the forward could not be traced, so that kept bytes are NaN
    no_layers: str  # why pipelines cannot cut the model
    no_plan: str  # why tensor ranks cannot split the layers

    def why_not(self, family: str) -> str:
        """Return why a family of modes does not work for the model; empty if it works."""
        return {"pipe": self.no_layers, "tensor": self.no_plan}.get(family, "")


def read(record: Mapping[str, Any]) -> Counted:
    """Read the record that `count.py` wrote for a model."""
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
