"""Model parallelism as a library: pipelines of any `nn.Sequential`, their schedules, and split layers."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from muster.pipe.local.pipe import Pipe as Pipe
    from muster.pipe.pipeline import Pipeline as Pipeline

_HOME = {
    "Pipe": "muster.pipe.local.pipe",
    "Pipeline": "muster.pipe.pipeline",
}

__all__ = ["Pipe", "Pipeline"]


def __getattr__(name: str) -> Any:
    """Import a class on first use, because schedules need no torch."""
    if name not in _HOME:
        raise AttributeError(f"module 'muster.pipe' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)
