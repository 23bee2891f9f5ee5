"""Tensor parallel as a library: layers split over ranks, by a table from names of modules to ways of splitting."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipe.tensor.cross_entropy import SplitCrossEntropy as SplitCrossEntropy
    from pipe.tensor.plan import Column as Column
    from pipe.tensor.plan import Heads as Heads
    from pipe.tensor.plan import Row as Row
    from pipe.tensor.plan import Sequence as Sequence
    from pipe.tensor.plan import SequenceStart as SequenceStart
    from pipe.tensor.plan import Vocabulary as Vocabulary
    from pipe.tensor.slices import TensorSlice as TensorSlice
    from pipe.tensor.split import TensorParallel as TensorParallel
    from pipe.tensor.split import parallelize as parallelize

_HOME = {
    "Column": "pipe.tensor.plan",
    "Heads": "pipe.tensor.plan",
    "Row": "pipe.tensor.plan",
    "Sequence": "pipe.tensor.plan",
    "SequenceStart": "pipe.tensor.plan",
    "SplitCrossEntropy": "pipe.tensor.cross_entropy",
    "TensorParallel": "pipe.tensor.split",
    "TensorSlice": "pipe.tensor.slices",
    "Vocabulary": "pipe.tensor.plan",
    "parallelize": "pipe.tensor.split",
}

__all__ = [
    "Column",
    "Heads",
    "Row",
    "Sequence",
    "SequenceStart",
    "SplitCrossEntropy",
    "TensorParallel",
    "TensorSlice",
    "Vocabulary",
    "parallelize",
]


def __getattr__(name: str) -> Any:
    """Import a class when it is first named: slices need no torch."""
    if name not in _HOME:
        raise AttributeError(f"module 'pipe.tensor' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)
