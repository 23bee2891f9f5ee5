"""Cut and join the values that layers pass on: a tensor, or nested tuples, lists and dictionaries.

    cut(value, lengths)     one value per micro-batch: every tensor is narrowed along its first dimension, the batch
    join(values)            the inverse: tensors are concatenated along their first dimension

Tensors without dimensions and all other objects are passed unchanged to every micro-batch.
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
    """Return the value with `function` applied to every tensor."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, (tuple, list)):
        return _like(value, [mapped(each, function) for each in value])
    if isinstance(value, dict):
        return {key: mapped(each, function) for key, each in value.items()}
    return value


def batch_of(value: Any) -> int:
    """Return the number of samples: the size of the first dimension, equal for all tensors of the value.

    Raises:
        ValueError: If no tensor has a dimension, or the numbers of samples differ.
    """
    found = sorted({tensor.shape[0] for tensor in tensors_of(value) if tensor.dim()})
    if not found:
        raise ValueError("inputs: no tensor with a dimension; expected at least one, with the batch as first dimension")
    if len(found) > 1:
        raise ValueError(
            f"inputs: tensors with {found} samples; expected equal numbers, because all are cut along their first "
            "dimension; if a tensor has no batch dimension, make it a buffer of its layer"
        )
    return found[0]


def cut(value: Any, lengths: Sequence[int]) -> list[Any]:
    """Cut a value into micro-batches; `lengths` has the number of samples of each."""
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
    """Concatenate the outputs of micro-batches.

    Raises:
        ValueError: If the outputs differ in structure, or a tensor has no dimensions.
    """
    first = values[0]
    if len(values) == 1:
        return first
    kinds = {type(each).__name__ for each in values}
    if len(kinds) > 1 and not all(isinstance(each, Tensor) for each in values):
        raise ValueError(f"outputs: micro-batches returned {sorted(kinds)}; expected one type")
    if isinstance(first, Tensor):
        if not first.dim():
            raise ValueError(
                f"outputs: each of {len(values)} micro-batches returned a tensor without dimensions; expected "
                "samples as first dimension; compute the loss from the whole output, or return one number per sample"
            )
        return torch.cat(list(values))
    if isinstance(first, (tuple, list, dict)):
        sizes = {tuple(each) if isinstance(each, dict) else len(each) for each in values}
        if len(sizes) > 1:
            raise ValueError(
                f"outputs: micro-batches returned {kinds.pop()}s with lengths or keys {sorted(sizes, key=str)}; "
                "expected the same for all"
            )
        if isinstance(first, dict):
            return {key: join([each[key] for each in values]) for key in first}
        return _like(first, [join(each) for each in zip(*values, strict=True)])
    if not all(_equal(each, first) for each in values):
        raise ValueError(f"outputs: micro-batches returned {list(values)}; expected tensors, or equal values")
    return first


def _equal(value: Any, other: Any) -> bool:
    """Compare values that are not tensors. Objects that contain tensors or arrays cannot be compared with ==."""
    try:
        return bool(value == other)
    except (RuntimeError, ValueError):
        raise ValueError(
            f"outputs: each micro-batch returned a {type(value).__name__}, which cannot be joined; expected tensors, "
            "or tuples, lists and dictionaries of them"
        ) from None


def _like(value: Any, parts: list[Any]) -> Any:
    """Build a tuple or list of the same type. A named tuple takes its fields as separate arguments."""
    if hasattr(value, "_fields"):
        return type(value)(*parts)
    return type(value)(parts)
