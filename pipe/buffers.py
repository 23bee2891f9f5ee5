"""Let a second forward read the same buffer values as the first one, and discard its writes.

    first forward     reads u, writes u              if u is written, a copy from before the forward is kept
    second forward    reads and writes the copy      the layer's own u keeps its current value

This makes recomputation correct for layers that read the buffers they write, such as spectral norm (power iteration).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase


class _Place(NamedTuple):
    """A buffer of a module, and its version at the start of a forward."""

    module: nn.Module
    name: str
    buffer: Tensor
    version: int


class Buffers:
    """The buffers of some layers, and the names of those that forwards write.

    Before the first forward in each mode (training, evaluation), all buffers are copied, to find the buffers that it
    writes. Buffers of batch norms are always copied, because their kernels write without increasing `_version`.
    """

    def __init__(self, layers: Sequence[tuple[str, nn.Module]]) -> None:
        self._modules = [
            (f"{name}.{path}".removesuffix("."), part) for name, layer in layers for path, part in layer.named_modules()
        ]
        self._written: dict[tuple[str, bool], set[str]] = {}  # names of written buffers, by module and training mode

    def before(self) -> "BufferSnapshot":
        """Copy the buffers that the next forward may overwrite. Call `after()` on the result after the forward."""
        places, copies = [], dict[int, Tensor]()
        for path, module in self._modules:
            written = self._written.get((path, module.training))
            for name, buffer in module._buffers.items():
                if buffer is None:
                    continue
                places.append(_Place(module, name, buffer, buffer._version))
                wanted = written is None or name in written or isinstance(module, _NormBase)
                if wanted and id(buffer) not in copies:
                    copies[id(buffer)] = buffer.detach().clone()
        return BufferSnapshot(self, places, copies)

    def learn(self, written: Callable[[nn.Module, str], bool | None]) -> None:
        """Record the buffers that the first forward in a mode wrote; check that later forwards write no other buffers.

        Raises:
            RuntimeError: If a forward wrote a buffer that earlier forwards in its mode did not write.
        """
        for path, module in self._modules:
            names = {name for name in module._buffers if written(module, name)}
            known = self._written.setdefault((path, module.training), names)
            if (more := names - known) and not isinstance(module, _NormBase):
                raise RuntimeError(
                    f"layer {path!r} has written its buffer {min(more)!r}, unlike in its first forward, so "
                    "recomputation would read a changed value; make every forward write the buffer, or pass "
                    "recompute=False"
                )


class BufferSnapshot:
    """The values of buffers before a forward."""

    def __init__(self, buffers: Buffers, places: Sequence[_Place], copies: dict[int, Tensor]) -> None:
        self._buffers, self._places, self._copies = buffers, places, copies

    def after(self) -> None:
        """Drop the copies of buffers that the first forward did not write.

        Raises:
            RuntimeError: If the forward wrote a buffer that earlier ones did not write.
        """
        changed = {(id(each.module), each.name): self._is_changed(each) for each in self._places}
        self._buffers.learn(lambda module, name: changed.get((id(module), name), False))
        kept = [each for each in self._places if changed[id(each.module), each.name]]
        self._places, self._copies = kept, {id(each.buffer): self._copies[id(each.buffer)] for each in kept}

    @contextmanager
    def as_they_were(self) -> Iterator[None]:
        """Replace the buffers by the copies within the block; afterwards put the layers' own buffers back."""
        own = [each.module._buffers[each.name] for each in self._places]
        for each in self._places:
            each.module._buffers[each.name] = self._copies[id(each.buffer)]
        try:
            yield
        finally:
            for each, buffer in zip(self._places, own, strict=True):
                each.module._buffers[each.name] = buffer

    def _is_changed(self, place: _Place) -> bool:
        now = place.module._buffers.get(place.name)
        if now is not place.buffer or now._version != place.version:
            return True
        copy = self._copies.get(id(place.buffer))
        return copy is not None and not torch.equal(copy, now)  # a buffer with NaN counts as changed
