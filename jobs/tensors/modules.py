"""List the buffers in a module's state, and create tensors for an optimizer's state."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from muster.jobs.checkpoint.pieces import Piece
from muster.jobs.tensors.parts import dtype_of

# Scalars that PyTorch keeps on the host, unless a kernel on the device reads them.
ON_HOST: Final = {"step", "mu_product"}


def persistent_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the tensor of each buffer in a module's state. A shared buffer is yielded once."""
    seen: set[int] = set()
    for path, part in module.named_modules():
        for key, buffer in part._buffers.items():
            if buffer is not None and key not in part._non_persistent_buffers_set and id(buffer) not in seen:
                seen.add(id(buffer))
                yield f"{path}.{key}".removeprefix("."), buffer


def room_for(parameter: Tensor, key: str, piece: Piece, group: Mapping[str, Any]) -> Tensor:
    """Return zeros for one entry of a parameter's optimizer state, on the device that its parameter group requires."""
    dtype = dtype_of(piece)
    if piece.shape == tuple(parameter.shape) and key not in ON_HOST:
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    on_host = key in ON_HOST and not (group.get("fused") or group.get("capturable"))
    return torch.zeros(piece.shape, dtype=dtype, device="cpu" if on_host else parameter.device)
