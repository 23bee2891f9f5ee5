"""Models that leave parameters unused, or have parameters of unusual forms."""

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """A residual layer with a spare one, which it uses if the caller says so."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.spare = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, spare: bool = False) -> Tensor:
        x = x + torch.tanh(self.inner(x))
        return x + self.spare(x) if spare else x


class Net(nn.Module):
    """`uses`: spare layers are used never, by some batches, or always. `form`: one more parameter of that form."""

    def __init__(self, uses: str, form: str = "") -> None:
        super().__init__()
        self.uses = uses
        self.first, self.blocks, self.head = nn.Linear(3072, 8), nn.ModuleList([Block(), Block()]), nn.Linear(8, 10)
        if form:
            odd = torch.ones(()) if form == "scalar" else (torch.eye(8) + torch.arange(64.0).view(8, 8) / 500).t()
            self.odd = nn.Parameter(odd)

    def forward(self, images: Tensor) -> Tensor:
        pixels = images.flatten(1)
        x = self.first(pixels)
        spare = self.uses == "always" or (self.uses == "some" and bool(pixels[0].sum() > pixels[-1].sum()))
        for block in self.blocks:
            x = block(x, spare)
        if hasattr(self, "odd"):
            x = x * self.odd if self.odd.dim() == 0 else x @ self.odd
        return self.head(x)


def build(uses: str = "never", form: str = "") -> nn.Module:
    return Net(uses, form)


def layers() -> nn.Module:
    """The same in layers, for pipelines."""
    return nn.Sequential(nn.Sequential(nn.Flatten(), nn.Linear(3072, 8)), Block(), Block(), nn.Linear(8, 10))
