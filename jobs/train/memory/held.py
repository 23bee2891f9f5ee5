"""Tensor accounting: the bytes that a rank holds for each purpose, independent of the allocator.

It counts storages, not tensors: views of a flat tensor are one storage, a sharded parameter is this rank's part of it,
and a parameter whose memory was freed counts nothing.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from muster.jobs.runfolder.memory_rows import KINDS

Held = Mapping[str, Iterable[Tensor]]


def bytes_by_kind(held: Held) -> dict[str, int]:
    """Add the storages of each kind up."""
    found = dict.fromkeys(KINDS, 0)
    for kind, storage in storages(held):
        found[kind] += storage.nbytes()
    return found


def storages(held: Held) -> Iterator[tuple[str, torch.UntypedStorage]]:
    """Yield the storages of each kind; one that several tensors or kinds share comes once, in the first kind."""
    seen: set[tuple[torch.device, int]] = set()
    for kind in KINDS:
        for tensor in held.get(kind, ()):
            storage = local(tensor).untyped_storage()
            key = (storage.device, storage.data_ptr())
            if storage.nbytes() and key not in seen:
                seen.add(key)
                yield kind, storage


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor; other tensors unchanged."""
    own = getattr(tensor, "_local_tensor", tensor)
    assert isinstance(own, Tensor)
    return own


def tensors_of(module: nn.Module, optimizer: torch.optim.Optimizer, wrapper: Any = None) -> dict[str, list[Tensor]]:
    """List the tensors that a rank holds of a module, its optimizer and, if there is one, the module's wrapper.

    For a sharded module these are its flat tensors (`homes`) and the shards. Tensors that the inner optimizer updates
    and that are not parameters are float32 copies: they belong to the optimizer.
    """
    inner = getattr(optimizer, "inner", optimizer)
    asked, stepped = _parameters(optimizer), _parameters(inner)
    homes = getattr(wrapper, "homes", ())
    at_home = {id(each) for home in homes for each in home.parameters}  # their memory may be freed
    every = [*module.parameters(), *asked]
    return {
        "parameters": [
            *(each for each in every if id(each) not in at_home),
            *(flat for home in homes for flat in home.kept()),
        ],
        "gradients": [
            *(each.grad for each in (*every, *stepped) if each.grad is not None),
            *(home.grad for home in homes if home.grad is not None),
        ],
        "optimizer": [*stepped, *_tensors(inner.state)],
        "buffers": list(module.buffers()),
    }


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [each for group in optimizer.param_groups for each in group["params"]]


def _tensors(state: Mapping[Any, Any]) -> Iterator[Tensor]:
    for each in state.values():
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, Mapping):
            yield from _tensors(each)
