"""Pipelines of one process for tests: layers that do what a test wants, on CPUs that are several devices."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from muster.pipe import Pipe

PATIENCE_S = 20.0  # until a meeting that never comes is given up


class Doing(nn.Module):
    """Does in a forward what a test wants."""

    def __init__(self, do: Callable[[Any], Any]) -> None:
        super().__init__()
        self.do = do

    def forward(self, x: Any) -> Any:
        return self.do(x)


def mlp(*widths: int) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after, dtype=torch.float64), nn.Tanh()]
    return nn.Sequential(*layers)


def pipe_of(*layers: nn.Module, chunks: int = 4, **settings: Any) -> Pipe:
    return Pipe(nn.Sequential(*layers), chunks, devices=["cpu"] * settings.pop("stages", len(layers)), **settings)
