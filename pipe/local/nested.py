"""What layers hand on: a tensor, or tuples, lists and dictionaries of tensors and of anything else.

    cut(value, lengths)     one value a micro-batch: every tensor is narrowed along its first dimension, the batch
    join(values)            the way back: tensors are concatenated along their first dimension

Tensors without dimensions and what is no tensor go to every micro-batch as they are.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a value, first to last."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from tensors_of(each)
    elif isinstance(value, dict):
        for each in value.values():
            yield from tensors_of(each)


def mapped(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return the value with every tensor replaced by what `function` makes of it."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, (tuple, list)):
        return _like(value, [mapped(each, function) for each in value])
    if isinstance(value, dict):
        return {key: mapped(each, function) for key, each in value.items()}
    return value


def batch_of(value: Any) -> int:
    """Return how many samples a value has: the first dimension that all of its tensors share.

    Raises:
        ValueError: there is no tensor with a dimension, or they have different numbers of samples.
    """
    found = sorted({tensor.shape[0] for tensor in tensors_of(value) if tensor.dim()})
    if not found:
        raise ValueError("inputs: no tensor with a dimension; wanted one at least, whose first dimension is the batch")
    if len(found) > 1:
        raise ValueError(
            f"inputs: tensors of {found} samples; wanted one number, as all are cut along their first dimension; "
            "give what has no batch to the layer that needs it, as a buffer"
        )
    return found[0]


def cut(value: Any, lengths: Sequence[int]) -> list[Any]:
    """Cut a value into micro-batches of so many samples."""
    if len(lengths) == 1:
        return [value]
    starts = [0, *accumulate(lengths)]

    def part(tensor: Tensor, start: int, length: int) -> Tensor:
        return tensor.narrow(0, start, length) if tensor.dim() else tensor

    return [
        mapped(value, lambda tensor, at=start, size=length: part(tensor, at, size))  # type: ignore[misc]
        for start, length in zip(starts, lengths, strict=False)
    ]


def join(values: Sequence[Any]) -> Any:
    """Concatenate what came of the micro-batches.

    Raises:
        ValueError: micro-batches made different things, or tensors without a dimension.
    """
    first = values[0]
    if len(values) == 1:
        return first
    kinds = {type(each).__name__ for each in values}
    if len(kinds) > 1 and not all(isinstance(each, Tensor) for each in values):
        raise ValueError(f"outputs: micro-batches made {sorted(kinds)}; wanted one type")
    if isinstance(first, Tensor):
        if not first.dim():
            raise ValueError(
                f"outputs: a tensor without dimensions of each of {len(values)} micro-batches; wanted tensors whose "
                "first dimension is the batch; make a loss of the whole output, or return it as one number a sample"
            )
        return torch.cat(list(values))
    if isinstance(first, (tuple, list, dict)):
        sizes = {tuple(each) if isinstance(each, dict) else len(each) for each in values}
        if len(sizes) > 1:
            raise ValueError(f"outputs: micro-batches made a {kinds.pop()} of {sorted(sizes, key=str)}; wanted one")
        if isinstance(first, dict):
            return {key: join([each[key] for each in values]) for key in first}
        return _like(first, [join(each) for each in zip(*values, strict=True)])
    if not all(_equal(each, first) for each in values):
        raise ValueError(f"outputs: micro-batches made {list(values)}; wanted tensors, or what is equal in all of them")
    return first


def _equal(value: Any, other: Any) -> bool:
    """Compare what is no tensor: objects with tensors or arrays in them do not say in one word whether they differ."""
    try:
        return bool(value == other)
    except (RuntimeError, ValueError):
        raise ValueError(
            f"outputs: micro-batches each made a {type(value).__name__}, which cannot be joined; wanted tensors, or "
            "tuples, lists and dictionaries of them"
        ) from None


def _like(value: Any, parts: list[Any]) -> Any:
    """Make a tuple or list of the same type; a named tuple takes its fields one by one."""
    if hasattr(value, "_fields"):
        return type(value)(*parts)
    return type(value)(parts)
