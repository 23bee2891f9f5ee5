"""A user's file: models, data, losses and optimizers that are right, and some that are not."""

import os
import random
from typing import Any

import torch
from torch import Tensor, nn

from muster.jobs.models.shapes import GPT_SHAPES
from muster.jobs.train.models.gpt import build_gpt
from muster.jobs.train.models.tensor_plan import GPT_PLAN


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(torch.relu(self.up(self.norm(x)))))


class Net(nn.Module):
    """Images to logits; the blocks lie one level down, and stages() cuts between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        linear = nn.Linear(192, width, bias=False)  # a bias before a batch norm has no gradient but rounding
        self.embed = nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), linear, nn.BatchNorm1d(width))
        self.body = nn.ModuleDict({"blocks": nn.ModuleList(Block(width) for _ in range(4))})
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(images)
        for block in self.body["blocks"]:
            x = block(x)
        return self.head(x)

    def stages(self) -> nn.Sequential:
        return nn.Sequential(self.embed, *self.body["blocks"], nn.Identity(), self.head)


def build(width: int = 16) -> Net:
    return Net(width)


def plan(net: Net) -> dict[str, Any]:
    from muster.pipe.tensor.plan import Column, Row

    return {"body.blocks.*.up": Column(), "body.blocks.*.down": Row()}


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits, targets, label_smoothing=0.1)


class Twin(nn.Module):
    """A built-in GPT as a user's module, with the same weights."""

    def __init__(self, name: str) -> None:
        super().__init__()
        for own, layer in build_gpt(GPT_SHAPES[name], seed=0).named_children():
            self.add_module(own, layer)

    def forward(self, tokens: Tensor) -> Tensor:
        for layer in self.children():
            tokens = layer(tokens)
        return tokens

    def stages(self) -> nn.Sequential:
        return nn.Sequential(*self.children())


def twin(name: str = "gpt-nano") -> Twin:
    return Twin(name)


def gpt_plan(model: nn.Module) -> dict[str, Any]:
    return dict(GPT_PLAN)


class Noisy(torch.utils.data.Dataset[Any]):
    """Samples with noise of torch and of Python: an augmentation."""

    classes = tuple("0123456789")

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.randn(3, 32, 32) + random.random() + index % 10, index % 10


def noisy(samples: int = 48, evaluation: bool = True) -> tuple[Noisy, Noisy | None]:
    return Noisy(samples), Noisy(20) if evaluation else None


class Sign(torch.optim.Optimizer):
    """Step by the sign of a running mean of gradients."""

    elementwise = True

    def __init__(self, params: Any, lr: float, beta: float = 0.5) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                    mean.lerp_(parameter.grad, 1 - group["beta"])
                    parameter.add_(mean.sign(), alpha=-group["lr"])


# What is not right ----------------------------------------------------------------------------------------------------


def raises() -> None:
    raise ValueError("no such luck\nand a second line")


def nothing() -> int:
    return 3


def frozen() -> nn.Module:
    return nn.Linear(2, 2).requires_grad_(False)


def of_the_rank() -> Net:
    return Net(16 + int(os.environ["RANK"]))


class Uncut(Net):
    stages = None


def uncut() -> Net:
    return Uncut(16)


class Renamed(Net):
    def stages(self) -> nn.Sequential:
        return nn.Sequential(self.embed, nn.Sequential(self.body["blocks"][0], nn.Linear(16, 16)), self.head)


def renamed() -> Net:
    return Renamed(16)


class Short(Net):
    def stages(self) -> nn.Sequential:
        return nn.Sequential(self.embed, self.head)


def short() -> Net:
    return Short(16)


class Late(Net):
    def forward(self, images: Tensor) -> Tensor:
        if self.training:
            raise KeyError("late")
        return super().forward(images)


def late() -> Net:
    return Late(16)


def stream() -> tuple[Any, None]:
    return iter(()), None


def records() -> tuple[list[dict[str, int]], None]:
    return [{"x": 1}] * 48, None


def empty() -> tuple[list[Any], None]:
    return [], None


def few() -> tuple[list[tuple[Tensor, int]], None]:
    return [(torch.zeros(3, 32, 32), 1)] * 48, None


def texts() -> tuple[list[tuple[str, int]], None]:
    return [("word", 1)] * 48, None


def ragged() -> tuple[list[tuple[Tensor, int]], None]:
    return [(torch.zeros(3 + index), 1) for index in range(48)], None


def per_sample(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits, targets, reduction="none")


class Side(nn.Module):
    def __init__(self, shared: nn.Linear, width: int) -> None:
        super().__init__()
        self.shared = nn.Linear(width, width, bias=False)
        self.shared.weight = shared.weight
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.shared(x))
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


class Tied(nn.Module):
    """Units share a parameter with the root, or with each other."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.body = nn.ModuleDict({"one": nn.Linear(192, width, bias=False), "two": nn.Linear(width, width)})
        shared = nn.Linear(width, width, bias=False)
        self.sides = nn.ModuleList(Side(shared, width) for _ in range(2))
        self.out, self.head = nn.Linear(192, width, bias=False), nn.Linear(width, 10)
        self.out.weight = self.body["one"].weight

    def forward(self, images: Tensor) -> Tensor:
        images = nn.functional.avg_pool2d(images, 4).flatten(1)
        x = self.body["two"](torch.relu(self.body["one"](images)))
        for side in self.sides:
            x = side(x)
        return self.head(x + self.out(images))


def tied(compile: bool = False) -> Tied:
    model = Tied()
    if compile:
        model.compile()
    return model


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(96, 16, batch_first=True), nn.Linear(16, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.lstm(images.transpose(1, 2).flatten(2))[0][:, -1])


def recurrent() -> Recurrent:
    return Recurrent()


class Unsaved(Sign):
    """An optimizer with state of a dtype that checkpoints do not have."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for each in group["params"]:
                self.state[each]["odd"] = torch.zeros(2, dtype=torch.complex64)
