"""Tensors by name, compared in float64."""

import torch
from torch import Tensor


def apart(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> list[str]:
    """Say what differs by more than the order of a sum makes."""
    if found.keys() != wanted.keys():
        return [f"names differ: {sorted(found.keys() ^ wanted.keys())}"]
    return [
        f"{name} is off by {float((found[name] - each).abs().max()):.3e}"
        for name, each in wanted.items()
        if not torch.allclose(found[name], each, rtol=1e-11, atol=1e-12)
    ]
