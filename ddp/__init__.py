"""Data parallelism as a library, for any `nn.Module`, independent of jobs, run folders and the launcher."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from muster.ddp.after_backward import AllReduce as AllReduce
    from muster.ddp.after_backward import GatherScatter as GatherScatter
    from muster.ddp.bucketed import BucketedDDP as BucketedDDP
    from muster.ddp.bucketed import FlatAllReduce as FlatAllReduce
    from muster.ddp.bucketed import OverlappedDDP as OverlappedDDP
    from muster.ddp.partition import DataPartitioner as DataPartitioner

_HOME = {
    "AllReduce": "muster.ddp.after_backward",
    "BucketedDDP": "muster.ddp.bucketed",
    "DataPartitioner": "muster.ddp.partition",
    "FlatAllReduce": "muster.ddp.bucketed",
    "GatherScatter": "muster.ddp.after_backward",
    "OverlappedDDP": "muster.ddp.bucketed",
}

__all__ = [
    "AllReduce",
    "BucketedDDP",
    "DataPartitioner",
    "FlatAllReduce",
    "GatherScatter",
    "OverlappedDDP",
]


def __getattr__(name: str) -> Any:
    """Import a wrapper on first use, because listing this package needs no torch."""
    if name not in _HOME:
        raise AttributeError(f"module 'ddp' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)
