"""A model of one's own: residual blocks of two linear layers, for the digits that ship with Muster."""

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """Two linear layers whose result is added to their input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, width) to the same shape."""
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """A network that maps images (batch, 3, 32, 32) to logits (batch, classes)."""

    def __init__(self, width: int, blocks: int, classes: int) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(3 * 8 * 8, width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits."""
        x = self.embed(images)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def stages(self) -> nn.Sequential:
        """Return the layers in their order: pipelines cut between them."""
        return nn.Sequential(self.embed, *self.blocks, self.head)


def build(width: int = 64, blocks: int = 4, classes: int = 10) -> Net:
    """Return the model that a job's `make` names, with its `args`."""
    return Net(width, blocks, classes)


def plan(net: Net) -> dict[str, object]:
    """Return how each layer is split over the ranks of mode tensor."""
    from muster.pipe.tensor.plan import Column, Row

    return {"blocks.*.up": Column(), "blocks.*.down": Row()}


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy with smoothed labels."""
    return nn.functional.cross_entropy(logits, targets, label_smoothing=0.1)
