"""A module that is awkward to share out, optimizers to step it with, and gradients that are the same on every rank."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

Kind = tuple[type[torch.optim.Optimizer], dict[str, Any]]

SGD: Kind = (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-2})
ADAMW: Kind = (torch.optim.AdamW, {"lr": 1e-2})

# Every element-wise optimizer of torch's, with its less usual states where it has some.
OPTIMIZERS: dict[str, Kind] = {
    "sgd": SGD,
    "sgd fused": (SGD[0], {**SGD[1], "fused": True}),
    "sgd plain": (torch.optim.SGD, {"lr": 0.05}),
    "adamw": ADAMW,
    "adamw fused": (ADAMW[0], {**ADAMW[1], "fused": True}),
    "adamw foreach": (ADAMW[0], {**ADAMW[1], "foreach": True, "amsgrad": True}),
    "adam": (torch.optim.Adam, {"lr": 1e-2, "weight_decay": 1e-2}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.05, "initial_accumulator_value": 0.1}),
    "adadelta": (torch.optim.Adadelta, {"lr": 0.5}),
    "adamax": (torch.optim.Adamax, {"lr": 1e-2}),
    "asgd": (torch.optim.ASGD, {"lr": 1e-2, "t0": 1.0}),
    "nadam": (torch.optim.NAdam, {"lr": 1e-2}),
    "radam": (torch.optim.RAdam, {"lr": 1e-2}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 1e-2, "momentum": 0.9, "centered": True}),
    "rprop": (torch.optim.Rprop, {"lr": 1e-2}),
}


class Ragged(nn.Module):
    """Sizes that nothing divides, fewer elements than ranks, none, a number, a tied, a frozen and a permuted one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 7)
        self.number = nn.Parameter(torch.randn(()))
        self.none = nn.Parameter(torch.randn(0, 3))
        self.up = nn.Linear(7, 15)
        self.frozen = nn.Parameter(torch.randn(15), requires_grad=False)
        self.two = nn.Parameter(torch.randn(2))
        self.permuted = nn.Parameter(torch.randn(7, 15).t())
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(self.embed(tokens)) * self.number + self.frozen)
        logits: Tensor = self.head(hidden @ self.permuted)
        return logits * self.two.sum() + self.none.sum()


class Several(nn.Module):
    """Layers of different types, in turns."""

    def __init__(self, dtypes: Sequence[torch.dtype], width: int = 9) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width).to(dtype) for dtype in dtypes)

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.layers:
            inputs = torch.tanh(layer(inputs.to(layer.weight.dtype)))
        return inputs.float()


def row_major(module: nn.Module) -> nn.Module:
    """Lay parameters out as sharding does: where vectors end in memory can change the last bit of a 16-bit step."""
    for parameter in module.parameters():
        parameter.data = parameter.data.contiguous()
    return module


def seeded(build: Callable[[], nn.Module], seed: int = 1, dtype: torch.dtype | None = None) -> nn.Module:
    """Build a module from a seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build() if dtype is None else build().to(dtype)


def ragged_loss(module: nn.Module, shard: int) -> Tensor:
    """Return a loss that depends on nothing but the parameters and the number of a shard."""
    tokens = torch.randint(11, (4, 6), generator=torch.Generator().manual_seed(100 + shard))
    tokens = tokens.to(next(module.parameters()).device)
    logits = module(tokens[:, :-1]).float()  # (batch, tokens, vocabulary)
    return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def draw_gradients(module: nn.Module, step: int, without: Collection[str] = (), scale: float = 1.0) -> None:
    """Give every parameter that learns a gradient of this step's, the same on all ranks; some get none."""
    for place, (name, parameter) in enumerate(module.named_parameters()):
        random = torch.Generator().manual_seed(1000 * step + place)
        drawn = torch.randn(parameter.shape, generator=random, dtype=torch.float64) * scale
        with torch.no_grad():  # laid out as autograd does
            gradient = torch.empty_like(parameter).copy_(drawn)
        parameter.grad = gradient if parameter.requires_grad and name not in without else None


def own_groups(module: nn.Module) -> list[dict[str, Any]]:
    """Deal parameters to three groups, in turns, each with hyper-parameters of its own; one has a frozen parameter."""
    parameters = list(module.parameters())
    return [
        {"params": parameters[0::3], "lr": 0.03},
        {"params": parameters[1::3], "weight_decay": 0.1},
        {"params": parameters[2::3]},
    ]
