"""ZeRO as a library, for any `nn.Module`: optimizer state, gradients and parameters sharded over all ranks.

Rajbhandari et al. 2020 (ZeRO) define the stages. Stage 1 shards optimizer state, stage 2 also gradients, and stage 3
also parameters.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from muster.zero.data_parallel import ShardedDataParallel as ShardedDataParallel
    from muster.zero.optimizer import ShardedOptimizer as ShardedOptimizer

_HOME = {
    "ShardedDataParallel": "muster.zero.data_parallel",
    "ShardedOptimizer": "muster.zero.optimizer",
}

__all__ = ["ShardedDataParallel", "ShardedOptimizer"]


def __getattr__(name: str) -> Any:
    """Import a class on first use, because listing this package needs no torch."""
    if name not in _HOME:
        raise AttributeError(f"module 'zero' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)
