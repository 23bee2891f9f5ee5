"""Trace one forward of a user's model: the bytes that each module saves for the backward, and the size of its output.

The tensors are PyTorch's fake tensors. They claim to be on the CPU, so that PyTorch chooses the same kernels as in
training, but run on the meta device: no values are computed, and no memory is allocated for them.

    frames    model ─ blocks.0 ─ blocks.0.up       bytes saved by autograd count for the innermost module
    parts     up, [blocks.0: relu], down, blocks.0     a part ends when its module ends or calls a child
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class Passed:
    """A module, or its computation before it calls a child: `kept` in bytes, `outputs` in elements, of a batch."""

    name: str
    layer: str
    kept: int = 0
    outputs: int = 0
    keeps_input: bool = False
    splits_kept: bool = False
    splits_outputs: bool = False
    is_last: bool = False  # the module's forward has ended


@dataclass
class Roles:
    """The roles of modules, by name, in a plan for tensor ranks."""

    columns: Collection[str] = ()  # layers with whole inputs and split outputs
    rows: Collection[str] = ()  # layers with split inputs and whole outputs


@dataclass
class ForwardHooks:
    """Hooks on all modules of a model during one forward. Storages with a key in `owned` do not count."""

    names: Mapping[nn.Module, str]
    layers: Collection[str]
    roles: Roles
    owned: Collection[int]
    passed: list[Passed] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._frames: list[Passed] = []
        self._seen = set(self.owned)
        self._layer = next(iter(self.layers), "")
        self._input: int | None = None  # key of the current layer's input
        self._split = False  # True between a column layer and a row layer

    @contextmanager
    def following(self) -> Iterator[None]:
        """Trace all forwards in this context."""
        handles = [
            handle
            for module in self.names
            for handle in (
                module.register_forward_pre_hook(self._enter),
                module.register_forward_hook(self._leave),
            )
        ]
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._save, lambda tensor: tensor):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, module: nn.Module, given: tuple[Any, ...]) -> None:
        name = self.names[module]
        if self._frames:
            self._flush(self._frames[-1])
        if name in self.layers:
            self._layer = name
            self._input = next((key_of(each) for each in given if isinstance(each, Tensor)), None)
        self._frames.append(Passed(name, self._layer))

    def _leave(self, module: nn.Module, given: tuple[Any, ...], made: Any) -> None:
        frame = self._frames.pop()
        is_row, is_column = frame.name in self.roles.rows, frame.name in self.roles.columns
        frame.layer, frame.outputs, frame.is_last = self._layer, _largest(made), True
        frame.splits_kept = self._split
        self._split = is_column or (self._split and not is_row)
        frame.splits_outputs = self._split
        self.passed.append(frame)

    def _flush(self, frame: Passed) -> None:
        """End the current part of a module that calls a child."""
        if not frame.kept:
            return
        self.passed.append(
            Passed(frame.name, self._layer, frame.kept, frame.outputs, frame.keeps_input, self._split, self._split)
        )
        frame.kept, frame.outputs, frame.keeps_input = 0, 0, False

    def _save(self, tensor: Tensor) -> Tensor:
        key, frame = key_of(tensor), self._frames[-1]
        if key not in self._seen:
            self._seen.add(key)
            frame.kept += tensor.untyped_storage().nbytes()
            frame.outputs = max(frame.outputs, tensor.numel())
            frame.keeps_input |= key == self._input
        return tensor


def key_of(tensor: Tensor) -> int:
    """Return a key that all tensors with the same storage have, as long as the storage exists."""
    return int(tensor.untyped_storage()._cdata)


def follow(make: Callable[[], ForwardHooks], run: Callable[[int], object], few: int, many: int) -> list[Passed]:
    """Run a forward with `few` and one with `many` samples; return the parts with their cost per sample.

    Tensors that do not grow with the batch (masks, positions, 16-bit copies of weights) are excluded. If the two
    forwards have different parts, the costs per sample are those of the first forward divided by `few`.
    """
    found = []
    for samples in (few, many):
        follower = make()
        with follower.following():
            kept = run(samples)  # keeps the graph and its storages alive, so that their keys stay distinct
        found.append(follower.passed)
        del kept
    first, second = found
    alike = [each.name for each in first] == [each.name for each in second]
    for index, part in enumerate(first):
        more = max(second[index].kept - part.kept, 0) / (many - few) if alike else part.kept / few
        part.kept, part.outputs = round(more), part.outputs // few
    return first


def _largest(made: Any) -> int:
    """Return the number of elements of the largest tensor in a module's output."""
    if isinstance(made, Tensor):
        return made.numel()
    within = made.values() if isinstance(made, Mapping) else made if isinstance(made, tuple | list) else ()
    return max(map(_largest, within), default=0)
