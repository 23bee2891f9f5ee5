"""Recompute a stage's forward in its backward, so that only the stage's inputs are kept between them."""

from typing import Any, Literal

from torch import nn
from torch.utils.checkpoint import checkpoint

from muster.pipe.buffers import Buffers, BufferSnapshot

Recompute = Literal["always", "except_last", "never"]
RECOMPUTE: tuple[Recompute, ...] = ("always", "except_last", "never")


def is_recomputed(how: Recompute, microbatch: int, microbatches: int) -> bool:
    """Return whether a micro-batch is recomputed.

    The last micro-batch need not be recomputed, because its backward begins at once.
    """
    return how == "always" or (how == "except_last" and microbatch < microbatches - 1)


def recomputed(layers: nn.Sequential, value: Any, buffers: Buffers) -> Any:
    """Run layers so that the backward runs them again, with the same random numbers, autocast and buffer values.

    Buffers that the first forward writes, such as the statistics of batch norms, are written only once.
    """
    first: list[BufferSnapshot] = []

    def run(value: Any) -> Any:
        if first:
            with first[0].as_they_were():
                return _through(layers, value)
        snapshot = buffers.before()
        value = _through(layers, value)
        snapshot.after()
        first.append(snapshot)
        return value

    return checkpoint(run, value, use_reentrant=False)


def _through(layers: nn.Sequential, value: Any) -> Any:
    for layer in layers:
        value = layer(value)
    return value
