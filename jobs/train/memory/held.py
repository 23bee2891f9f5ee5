"""Count the bytes of a rank's tensors by purpose, independent of the allocator.

Storages are counted, not tensors: all views of a flat tensor count once, a sharded parameter counts as this rank's part
of it, and a parameter whose memory was freed counts as 0.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from muster.jobs.runfolder.memory_rows import KINDS

Held = Mapping[str, Iterable[Tensor]]


def bytes_by_kind(held: Held) -> dict[str, int]:
    """Return the total bytes of the storages of each kind."""
    found = dict.fromkeys(KINDS, 0)
    for kind, storage in storages(held):
        found[kind] += storage.nbytes()
    return found


def storages(held: Held) -> Iterator[tuple[str, torch.UntypedStorage]]:
    """Yield every storage once, even if several tensors share it, with the first kind that has it."""
    seen: set[tuple[torch.device, int]] = set()
    for kind in KINDS:
        for tensor in held.get(kind, ()):
            storage = local(tensor).untyped_storage()
            key = (storage.device, storage.data_ptr())
            if storage.nbytes() and key not in seen:
                seen.add(key)
                yield kind, storage


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, or any other tensor unchanged."""
    own = getattr(tensor, "_local_tensor", tensor)
    assert isinstance(own, Tensor)
    return own


def tensors_of(module: nn.Module, optimizer: torch.optim.Optimizer, wrapper: Any = None) -> dict[str, list[Tensor]]:
    """List a rank's tensors by kind, from a module, its optimizer and, if there is one, the module's wrapper.

    If the wrapper shards the module, its `flat_parameters` replace the parameters that they contain. Float32 masters,
    which the inner optimizer updates instead of the parameters, count as optimizer state.
    """
    inner = getattr(optimizer, "inner", optimizer)
    asked, stepped = _parameters(optimizer), _parameters(inner)
    flat_parameters = getattr(wrapper, "flat_parameters", ())
    in_flat = {
        id(each) for flat_parameter in flat_parameters for each in flat_parameter.parameters
    }  # parameters whose own memory may be freed
    every = [*module.parameters(), *asked]
    return {
        "parameters": [
            *(each for each in every if id(each) not in in_flat),
            *(flat for flat_parameter in flat_parameters for flat in flat_parameter.kept()),
        ],
        "gradients": [
            *(each.grad for each in (*every, *stepped) if each.grad is not None),
            *(flat_parameter.grad for flat_parameter in flat_parameters if flat_parameter.grad is not None),
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
