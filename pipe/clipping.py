"""Clip the gradients of a pipeline by their norm over all stages."""

from collections.abc import Container

import torch
from torch import Tensor, nn

from muster.ddp.norms import clip_by, reproducible_norm
from muster.pipe.wires.connections import Connections


def clip(module: nn.Module, tied: Container[str], connections: Connections | None, max_norm: float) -> Tensor:
    """Clip in place; return the norm before clipping, a float64 scalar. Every rank of the pipeline must call this.

    `tied` names the parameters that an earlier rank also has. The earlier rank includes them in the norm; this rank
    only scales them.

    Raises:
        ValueError: If a gradient is sparse.
    """
    named = [(name, each.grad) for name, each in module.named_parameters() if each.grad is not None]
    if sparse := [name for name, grad in named if grad.is_sparse]:
        raise ValueError(f"{sparse[0]} has a sparse gradient, which cannot be clipped; make it dense first")
    counted = [grad for name, grad in named if name not in tied]
    group = None if connections is None else connections.given
    norm = reproducible_norm(counted, group, reduce=connections is not None)
    with torch.no_grad():
        clip_by([grad for _, grad in named], norm, max_norm)
    return norm
