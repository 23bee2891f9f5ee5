"""Buffers for a second forward: it reads what the first one read, and what it writes does not last.

    first forward     reads u, writes u        a copy of u from before is kept, of such buffers only
    second forward    reads the copy, writes the copy           the layer's own u stays what it has become since

So layers are recomputed right whose forwards read what they write, as the power iterations of a spectral norm do.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase


class _Place(NamedTuple):
    """A buffer of a module."""

    module: nn.Module
    name: str
    buffer: Tensor
    version: int


class Buffers:
    """The buffers of some layers, and which of them their forwards write.

    The first forward in training, and the first one in evaluation, tell: for it all are copied. Those of batch norms
    are copied always: kernels that update statistics do not count what they write.
    """

    def __init__(self, layers: Sequence[tuple[str, nn.Module]]) -> None:
        self._modules = [
            (f"{name}.{path}".removesuffix("."), part) for name, layer in layers for path, part in layer.named_modules()
        ]
        self._written: dict[tuple[str, bool], set[str]] = {}  # of a module in a mode: the names

    def before(self) -> "Before":
        """Keep what a first forward may overwrite; call `after()` when it is over."""
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
        return Before(self, places, copies)

    def learn(self, written: Callable[[nn.Module, str], bool | None]) -> None:
        """Note what was written in a mode that is new; of the others check that nothing else was.

        Raises:
            RuntimeError: a buffer was written that forwards had not written before.
        """
        for path, module in self._modules:
            names = {name for name in module._buffers if written(module, name)}
            known = self._written.setdefault((path, module.training), names)
            if (more := names - known) and not isinstance(module, _NormBase):
                raise RuntimeError(
                    f"layer {path!r} has written its buffer {min(more)!r}, which it did not in its first forward: a "
                    "second forward would not find what the first one read; pass recompute=False and layerwise=False, "
                    "or let every forward write it"
                )


class Before:
    """What buffers were before a forward."""

    def __init__(self, buffers: Buffers, places: Sequence[_Place], copies: dict[int, Tensor]) -> None:
        self._buffers, self._places, self._copies = buffers, places, copies

    def after(self) -> None:
        """Let go what the first forward has not written.

        Raises:
            RuntimeError: it has written what earlier ones had not.
        """
        changed = {(id(each.module), each.name): self._is_changed(each) for each in self._places}
        self._buffers.learn(lambda module, name: changed.get((id(module), name), False))
        kept = [each for each in self._places if changed[id(each.module), each.name]]
        self._places, self._copies = kept, {id(each.buffer): self._copies[id(each.buffer)] for each in kept}

    @contextmanager
    def as_they_were(self) -> Iterator[None]:
        """Let a second forward have the copies; afterwards the layers have their own again."""
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
        return copy is not None and not torch.equal(copy, now)  # NaN is never equal, and so is kept
