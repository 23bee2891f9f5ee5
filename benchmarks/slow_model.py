"""The model of `stragglers.py`: on one rank, every forward and backward takes `factor` times as long as it would.

The delay follows the rank's own computation: when the backward reaches the first layer, the rank sleeps for
(factor - 1) times what it has computed since its forward began. So it needs no processor for it, like a throttled node.
"""

import os
import time

import torch
from torch import Tensor, nn


class Throttled(nn.Module):
    """Linear layers on the images, with the delay in the backward."""

    def __init__(self, width: int, layers: int, factor: float) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.AvgPool2d(2), nn.Flatten(), nn.Linear(3 * 16 * 16, width))
        self.hidden = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.head = nn.Linear(width, 10)
        self.delay = factor - 1.0

    def forward(self, images: Tensor) -> Tensor:
        """Images (batch, 3, 32, 32) to logits (batch, 10)."""
        began = time.perf_counter()
        x = self.first(images)
        if self.delay and x.requires_grad:
            x.register_hook(lambda gradient: time.sleep(self.delay * (time.perf_counter() - began)))
        for layer in self.hidden:
            x = torch.relu(layer(x))
        return self.head(x)


def build(width: int = 256, layers: int = 4, slow: int = -1, factor: float = 1.3) -> Throttled:
    """Return the model of this rank; rank `slow` is the slow one."""
    return Throttled(width, layers, factor if int(os.environ.get("RANK", "-1")) == slow else 1.0)
