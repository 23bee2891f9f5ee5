"""Detect parameters that share memory with another tensor. Sharding would move the parameters, but not the other
tensor.

    head.weight = embed.weight             one parameter with two names: allowed
    head.weight.data = embed.weight.data   two parameters in one memory: sharding would separate them
    self.rows = self.weight.data[:4]       a view, kept as an attribute or buffer: it would never be updated

Views of one tensor that share no element, such as the weights of cuDNN's RNNs, are allowed.
"""

from collections.abc import Iterable, Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

Named = Iterable[tuple[str, Tensor]]
PARAMS: Final = "params"


def require_own_memory(module: nn.Module) -> None:
    """Check that no parameter of a module shares memory with another parameter, a buffer, or a plain attribute.

    Raises:
        ValueError: If a parameter shares memory with another tensor. The message names both.
    """
    parameters = list(module.named_parameters())
    known = {id(each) for _, each in parameters}
    require_apart(parameters, ((name, each) for name, each in _kept_by(module) if id(each) not in known))


def require_apart(parameters: Named, others: Named = ()) -> None:
    """Check that parameters share no element with each other, nor with other tensors.

    Raises:
        ValueError: If a parameter shares memory with another tensor. The message names both.
    """
    of_storage: dict[int, list[tuple[str, Tensor]]] = {}
    for name, each in parameters:
        if _is_somewhere(each):
            of_storage.setdefault(each.untyped_storage().data_ptr(), []).append((name, each))
    for of_one in of_storage.values():
        of_one.sort(key=lambda pair: _bounds(pair[1]))
        for place, (name, each) in enumerate(of_one):
            for other, tensor in of_one[place + 1 :]:
                if _bounds(tensor)[0] >= _bounds(each)[1]:
                    break  # `other` and all later tensors begin after the end of `each`
                if _overlap(each, tensor):
                    raise ValueError(
                        f"parameters {name} and {other} share memory, but sharding would separate them; make them "
                        f"one parameter ({other} = {name}), or clone() one"
                    )
    for other, tensor in others:
        for name, each in of_storage.get(tensor.untyped_storage().data_ptr(), ()) if _is_somewhere(tensor) else ():
            if _overlap(each, tensor):
                raise ValueError(
                    f"{other} is a view of parameter {name}, which sharding would move to other memory; create it "
                    "again in each forward, or clone() it"
                )


def _kept_by(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield buffers, and tensors that are plain attributes of modules, including those in lists and dictionaries."""
    yield from ((f"buffer {name}", each) for name, each in module.named_buffers())
    for prefix, part in module.named_modules():
        for name, kept in vars(part).items():
            if name in ("_parameters", "_buffers", "_modules") or f"{name}_orig" in part._parameters:
                continue  # spectral_norm and prune compute NAME from NAME_orig in each forward
            yield from (
                (f"attribute {prefix}{'.' if prefix else ''}{name}", each)
                for each in tree_leaves(kept)
                if isinstance(each, Tensor)
            )


def _is_somewhere(tensor: Tensor) -> bool:
    """Return whether a tensor has elements in memory."""
    if is_lazy(tensor) or tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta:
        return False
    return tensor.numel() > 0 and tensor.untyped_storage().nbytes() > 0


def _bounds(tensor: Tensor) -> tuple[int, int]:
    """Return the offsets of a tensor's first byte and of its end in its storage."""
    first = int(tensor.storage_offset())
    last = first + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first * tensor.itemsize, (last + 1) * tensor.itemsize


def _overlap(parameter: Tensor, other: Tensor) -> bool:
    """Return whether a parameter and another tensor in the same storage share a byte."""
    (start, stop), (other_start, other_stop) = _bounds(parameter), _bounds(other)
    if stop <= other_start or other_stop <= start:
        return False
    marks = torch.zeros(parameter.untyped_storage().nbytes(), dtype=torch.bool)
    _bytes_of(parameter, marks).fill_(True)
    return bool(_bytes_of(other, marks).any())


def _bytes_of(tensor: Tensor, marks: Tensor) -> Tensor:
    size, offset = tensor.itemsize, tensor.storage_offset()
    return marks.as_strided((*tensor.shape, size), (*(each * size for each in tensor.stride()), 1), offset * size)


def refuse_duplicates(group: dict[str, Any]) -> None:
    """Check that a parameter group lists each parameter once, because torch.optim only warns."""
    given = group[PARAMS]
    if isinstance(given, (Tensor, set)):
        return
    group[PARAMS] = list(given)
    tensors = [each[1] if isinstance(each, tuple) else each for each in group[PARAMS]]
    places = {id(each): place for place, each in reversed(list(enumerate(tensors)))}
    for place, each in enumerate(tensors):
        if places[id(each)] != place:
            raise ValueError(
                f"parameters {places[id(each)]} and {place} of a group are the same; list each parameter once"
            )
