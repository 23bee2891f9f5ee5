"""Small models with features that wrappers often handle wrongly, and batches that depend only on step and rank.

All computation is in float64, where orders of summation differ only by about 1e-12, so that faults stand out.
"""

from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH: Final = 32
LAYERS: Final = 10
BATCH: Final = 8  # number of samples per rank and step


class Toy(nn.Module):
    """Linear layers with a shared weight, a layer that can be left unused, a frozen parameter, and buffers."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.tied = nn.Linear(WIDTH, WIDTH, bias=False)
        self.tied.weight = self.layers[0].weight  # type: ignore[assignment]
        self.frozen = nn.Parameter(torch.rand(WIDTH) + 0.5, requires_grad=False)
        self.spare = nn.Linear(WIDTH, WIDTH)
        self.uses_spare = True
        self.offset: Tensor
        self.register_buffer("offset", torch.rand(WIDTH))
        self.register_buffer("count", torch.full((), seed))

    def forward(self, x: Tensor) -> Tensor:
        """Map (samples, WIDTH) to (samples, WIDTH)."""
        x = x * self.frozen + self.offset
        for layer in self.layers:
            x = x + functional.gelu(layer(x))
        x = x + functional.gelu(self.spare(x)) if self.uses_spare else x
        return functional.linear(x, self.tied.weight)


class Residual(nn.Module):
    """A linear layer with a GELU, added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Map (samples, WIDTH) to (samples, WIDTH)."""
        return x + functional.gelu(self.inner(x))


def layers(seed: int) -> nn.Sequential:
    """Return a stack of equal layers and a last linear one, for classes that cut a model into parts."""
    torch.manual_seed(seed)
    return nn.Sequential(*(Residual() for _ in range(LAYERS)), nn.Linear(WIDTH, WIDTH))


def batch(step: int, rank: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return a rank's inputs and targets, (BATCH, WIDTH) each."""
    draws = torch.Generator().manual_seed(1_000 * (step + 1) + rank)
    inputs, targets = (torch.randn(BATCH, WIDTH, generator=draws, dtype=torch.float64) for _ in range(2))
    return inputs.to(device), targets.to(device)


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean squared error."""
    return functional.mse_loss(outputs, targets)
