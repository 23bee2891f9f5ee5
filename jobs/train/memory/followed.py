"""Follow one forward of a made model: what every module keeps for the backward, and what it hands on.

Tensors are PyTorch's fake ones: kernels run on the meta device, and the tensors still say that they are on the CPU, so
that the same kernels are chosen as in training. No memory is taken for numbers, and none is computed.

    frames    model ─ blocks.0 ─ blocks.0.up       bytes that autograd saves count for the innermost module
    parts     up, [blocks.0: relu], down, blocks.0     a part ends where its module ends, or begins a child
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class Passed:
    """A module, or what it computed before one of its children; bytes and elements of a whole batch."""

    name: str
    layer: str
    kept: int = 0
    outputs: int = 0
    keeps_input: bool = False
    splits_kept: bool = False
    splits_outputs: bool = False
    is_last: bool = False  # the module has ended


@dataclass
class Roles:
    """What a plan for tensor ranks makes of modules, by name."""

    columns: Collection[str] = ()  # whole inputs, split outputs
    rows: Collection[str] = ()  # split inputs, whole outputs


@dataclass
class Follower:
    """Hooks on all modules of a model, for one forward; `owned` are keys of storages that do not count."""

    names: Mapping[nn.Module, str]
    layers: Collection[str]
    roles: Roles
    owned: Collection[int]
    passed: list[Passed] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._frames: list[Passed] = []
        self._seen = set(self.owned)
        self._layer = next(iter(self.layers), "")
        self._input: int | None = None  # of the layer at work
        self._split = False  # between a column layer and a row layer

    @contextmanager
    def following(self) -> Iterator[None]:
        """Follow what is forwarded in this context."""
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
        """End a part of a module that goes on."""
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
    """Return what two tensors of one storage have in common, while both live."""
    return int(tensor.untyped_storage()._cdata)


def follow(make: Callable[[], Follower], run: Callable[[int], object], few: int, many: int) -> list[Passed]:
    """Forward two batches, of `few` and of `many` samples; return the parts as one sample adds to them.

    What does not grow with the batch - masks, positions, 16-bit copies of weights - is left out. A model whose parts
    depend on the batch is halved instead: all that a batch of `few` keeps counts for its samples.
    """
    found = []
    for samples in (few, many):
        follower = make()
        with follower.following():
            kept = run(samples)  # holds the graph, and so the storages that the follower tells apart
        found.append(follower.passed)
        del kept
    first, second = found
    alike = [each.name for each in first] == [each.name for each in second]
    for index, part in enumerate(first):
        more = max(second[index].kept - part.kept, 0) / (many - few) if alike else part.kept / few
        part.kept, part.outputs = round(more), part.outputs // few
    return first


def _largest(made: Any) -> int:
    """Return the elements of the largest tensor in what a module returned."""
    if isinstance(made, Tensor):
        return made.numel()
    within = made.values() if isinstance(made, Mapping) else made if isinstance(made, tuple | list) else ()
    return max(map(_largest, within), default=0)
