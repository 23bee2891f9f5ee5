"""Tensor parallelism as a library: split layers over ranks by a table from module names to rules."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from muster.pipe.tensor.cross_entropy import SplitCrossEntropy as SplitCrossEntropy
    from muster.pipe.tensor.plan import Column as Column
    from muster.pipe.tensor.plan import Heads as Heads
    from muster.pipe.tensor.plan import Row as Row
    from muster.pipe.tensor.plan import Sequence as Sequence
    from muster.pipe.tensor.plan import SequenceStart as SequenceStart
    from muster.pipe.tensor.plan import Vocabulary as Vocabulary
    from muster.pipe.tensor.slices import TensorSlice as TensorSlice
    from muster.pipe.tensor.split import TensorParallel as TensorParallel
    from muster.pipe.tensor.split import parallelize as parallelize

_HOME = {
    "Column": "muster.pipe.tensor.plan",
    "Heads": "muster.pipe.tensor.plan",
    "Row": "muster.pipe.tensor.plan",
    "Sequence": "muster.pipe.tensor.plan",
    "SequenceStart": "muster.pipe.tensor.plan",
    "SplitCrossEntropy": "muster.pipe.tensor.cross_entropy",
    "TensorParallel": "muster.pipe.tensor.split",
    "TensorSlice": "muster.pipe.tensor.slices",
    "Vocabulary": "muster.pipe.tensor.plan",
    "parallelize": "muster.pipe.tensor.split",
}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    """Import a class on first use, because slices need no torch."""
    if name not in _HOME:
        raise AttributeError(f"module 'muster.pipe.tensor' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)
