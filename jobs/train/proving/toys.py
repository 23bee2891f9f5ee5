"""Small models with features that wrappers often handle wrongly, and batches that depend on step and rank only.

All computation is in float64, so that any order of summation agrees to 1e-12 and a fault stands out.
"""

from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH: Final = 32
LAYERS: Final = 10
BATCH: Final = 8  # samples per rank and step


class Toy(nn.Module):
    """Linear layers, of which two share a weight and one is used only on request; a frozen parameter; buffers."""

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
    """A linear layer beside its input."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Map (samples, WIDTH) to (samples, WIDTH)."""
        return x + functional.gelu(self.inner(x))


def layers(seed: int) -> nn.Sequential:
    """Return equal layers in a row, for classes that cut a model into parts."""
    torch.manual_seed(seed)
    return nn.Sequential(*(Residual() for _ in range(LAYERS)), nn.Linear(WIDTH, WIDTH))


def batch(step: int, rank: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return inputs and targets (BATCH, WIDTH) of a rank."""
    draws = torch.Generator().manual_seed(1_000 * (step + 1) + rank)
    inputs, targets = (torch.randn(BATCH, WIDTH, generator=draws, dtype=torch.float64) for _ in range(2))
    return inputs.to(device), targets.to(device)


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean squared error."""
    return functional.mse_loss(outputs, targets)
