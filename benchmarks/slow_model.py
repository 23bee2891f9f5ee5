"""The model of `stragglers.py`: its ranks compute on a made device, and one of them takes `factor` times as long.

The ranks of a box share a few cores, and a rank that waits for a core is slow for that reason. So the time of the
computation is made: a rank sleeps for `work_s` per step, as a host does whose GPU computes, a third of it in the
forward. It varies by `noise` (standard deviation, log-normal) from step to step, independently on every rank. The
layers are small; their time comes on top.
"""

import os
import random
import time

import torch
from torch import Tensor, nn


class OnMadeDevice(nn.Module):
    """Linear layers on the images, and the sleeps."""

    def __init__(self, width: int, layers: int, work_s: float, noise: float) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(3 * 8 * 8, width))
        self.hidden = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.head = nn.Linear(width, 10)
        self.work_s, self.noise = work_s, noise
        self.chance = random.Random(int(os.environ.get("RANK", "0")))

    def forward(self, images: Tensor) -> Tensor:
        """Images (batch, 3, 32, 32) to logits (batch, 10)."""
        x = self.first(images)
        if x.requires_grad:
            work_s = len(images) / 16 * self.work_s * self.chance.lognormvariate(0.0, self.noise)
            time.sleep(work_s / 3)
            x.register_hook(lambda gradient: time.sleep(work_s * 2 / 3))
        for layer in self.hidden:
            x = torch.relu(layer(x))
        return self.head(x)


def build(slow: int = -1, factor: float = 1.3, work_s: float = 0.03, noise: float = 0.1) -> OnMadeDevice:
    """Return the model of this rank; rank `slow` is the slow one. The work follows the samples: `work_s` for 16."""
    mine = factor if int(os.environ.get("RANK", "-1")) == slow else 1.0
    return OnMadeDevice(64, 2, work_s * mine, noise)
