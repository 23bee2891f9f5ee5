"""What a pipeline must do, as functions that run on every rank and return what is wrong: [] if nothing is.

Tests and mutations run the same functions. Each builds the same model twice: one is cut over the ranks, the other is
trained by a loop over micro-batches, as one process would. A difference of one bit is wrong.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from muster.jobs.models.shapes import POOL, VGG_SHAPES, GptShape, VggShape
from muster.jobs.train.models.gpt import build_gpt
from muster.jobs.train.models.stack import mean_loss
from muster.jobs.train.models.vgg import build_vgg
from muster.jobs.train.rng.keyed import key
from muster.jobs.world.world import World
from muster.pipe.pipeline import Pipeline
from muster.pipe.schedules.tables import schedule
from support.data_parallel import distance, same_bits

CLASSES = 7
Batch = tuple[Tensor, Tensor]


def vgg() -> nn.Sequential:
    """Batch norm after each convolution; work in place; layers without parameters."""
    return build_vgg(VggShape("own", (3, POOL, 4, POOL, 4, POOL, 4, POOL, 5, POOL), CLASSES), 1)


def gpt(tied: bool = False, dropout: float = 0.2, layers: int = 3) -> nn.Sequential:
    return build_gpt(
        GptShape(
            "own", d_model=6, d_ff=10, layers=layers, heads=2, context=5, vocabulary=CLASSES, tied=tied, dropout=dropout
        ),
        1,
    )


class Transposed(nn.Module):
    """Makes what is not contiguous."""

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


class Shifted(nn.Module):
    """Its parameter has the shape of what it adds to: autograd may take the gradient that comes for its own."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(*shape))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift.view(1, *self.shift.shape)


class Counted(nn.Module):
    """Counts its forwards in a buffer, and uses the count."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.count += 1
        return x * 1.5


def odd() -> nn.Sequential:
    """Names, views, outputs that are not contiguous, buffers, a frozen beginning, a parameter that nobody uses."""
    torch.manual_seed(3)
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        frozen=nn.Linear(4, 6),
        turn=Transposed(),
        mix=nn.Linear(3, 3),
        back=Transposed(),
        flatten=nn.Flatten(),
        inner=nn.Sequential(nn.ReLU(inplace=True), nn.Linear(18, 8), nn.Dropout(0.3)),
        shifted=Shifted(8),
        counted=Counted(),
        same=nn.Identity(),
        head=nn.Linear(8, CLASSES),
    )
    layers["mix"].register_parameter("unused", nn.Parameter(torch.ones(2)))
    layers["frozen"].requires_grad_(False)
    return nn.Sequential(layers)


class Detached(nn.Module):
    """Lets no gradient back."""

    def forward(self, x: Tensor) -> Tensor:
        return x.detach() * 1.0


def ends() -> nn.Sequential:
    """A gradient that ends in the middle, complex numbers, work in place behind a view, a last layer of no work."""
    torch.manual_seed(4)
    return nn.Sequential(
        nn.Linear(4, 4),
        nn.Linear(4, 4),
        Detached(),
        nn.Linear(4, 4, dtype=torch.float32),
        Complex(),
        Real(),
        nn.Flatten(),
        nn.ReLU(inplace=True),
        nn.Linear(12, CLASSES),
        nn.Identity(),
    )


class Complex(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.complex(x, x * 2.0)


class Real(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.abs()


def batch_of(model: str, samples: int, seed: int, device: torch.device) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    if model.startswith("gpt"):
        tokens = torch.randint(CLASSES, (samples, 6), generator=generator).to(device)
        return tokens[:, :-1], tokens[:, 1:]
    inputs = torch.randn(samples, *((3, 32, 32) if model.startswith("vgg") else (3, 4)), generator=generator)
    return inputs.to(device), torch.randint(CLASSES, (samples,), generator=generator).to(device)


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    return mean_loss(outputs, targets) if outputs.dim() > 2 else functional.cross_entropy(outputs, targets)


MODELS: dict[str, Callable[[], nn.Sequential]] = {
    "vgg": vgg,
    "vgg16": lambda: build_vgg(VGG_SHAPES["vgg16"], 1),
    "gpt": gpt,
    "gpt tied": lambda: gpt(tied=True),
    "gpt plain": lambda: gpt(dropout=0.0),
    "odd": odd,
    "ends": ends,
}


def seed_of(step: int) -> Callable[[int, int], int]:
    """Key dropout by step, micro-batch and layer."""
    return lambda microbatch, layer: key(11, step, microbatch, layer)


class Loop:
    """One process."""

    def __init__(self, model: str, microbatches: int, device: torch.device) -> None:
        self.module, self.microbatches = MODELS[model]().to(device), microbatches
        self.loss_sum = torch.zeros((), dtype=torch.float64)

    def parts(self, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        parts = min(self.microbatches, len(tensors[0]))
        return zip(*(each.tensor_split(parts) for each in tensors), strict=True)

    def step(self, inputs: Tensor, targets: Tensor, seeds: Callable[[int, int], int]) -> Tensor:
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=inputs.device)
        for index, (x, y) in enumerate(self.parts(inputs, targets)):
            samples = len(x)
            for number, layer in enumerate(self.module):
                torch.manual_seed(seeds(index, number))
                x = layer(x)
            loss = loss_of(x, y)
            self.loss_sum += loss.detach().double() * samples
            (loss * (samples / len(inputs))).backward()
        return self.loss_sum / len(inputs)

    def evaluate(self, inputs: Tensor) -> Tensor:
        self.module.eval()
        with torch.no_grad():
            outputs = torch.cat([self.module(x) for (x,) in self.parts(inputs)])
        self.module.train()
        return outputs


@dataclass(frozen=True)
class Case:
    """One way to train, JSON all through."""

    model: str
    schedule: str
    microbatches: int
    batches: tuple[int, ...] = (8, 8)
    settings: dict[str, Any] = field(default_factory=dict)
    chunks: int = 2


def optimizers_of(*modules: nn.Module) -> list[torch.optim.Optimizer]:
    """Make one for each module that has parameters: a stage may have none."""
    return [torch.optim.SGD(each.parameters(), lr=0.05, momentum=0.9) for each in modules if [*each.parameters()]]


def built(world: World, case: Case) -> Pipeline:
    table = schedule(case.schedule, world.size, case.microbatches, chunks=case.chunks)
    layers = MODELS[case.model]().to(world.device)
    return Pipeline(layers, table, loss=loss_of, process_group=world.group, **case.settings)


def wrong_training(world: World, case: Case) -> list[str]:
    """Steps must have a loop's losses, gradients, parameters and buffers, bit for bit, and so must evaluations."""
    pipeline, loop = built(world, case), Loop(case.model, case.microbatches, world.device)
    optimizers = optimizers_of(pipeline.module, loop.module)
    problems: list[str] = []
    for step, samples in enumerate(case.batches):
        inputs, targets = batch_of(case.model, samples, step, world.device)
        for each in optimizers:
            each.zero_grad()
        if not case.settings.get("cuda_graphs"):  # which record no seeds
            pipeline.hooks.seeds = seed_of(step)
        problems += [f"step {step}: {each}" for each in differences(pipeline, loop, inputs, targets, seed_of(step))]
        for each in optimizers:
            each.step()
    problems += [f"after: {each}" for each in states_apart(pipeline.module, loop.module)]
    inputs, _ = batch_of(case.model, max(case.batches) + 3, 99, world.device)
    found, wanted = pipeline.evaluate(inputs), loop.evaluate(inputs)
    if not same_bits(found, wanted):
        problems.append(f"evaluation has other bits, by {distance(found, wanted):.2e}")
    if not all(each.training for each in pipeline.module.modules()):
        problems.append("evaluation leaves layers in evaluation mode")
    return problems


def differences(
    pipeline: Pipeline, loop: Loop, inputs: Tensor, targets: Tensor, seeds: Callable[[int, int], int]
) -> list[str]:
    """Take a step both ways; name the losses and gradients that differ."""
    reads_inputs, reads_targets = 0 in pipeline.stages, pipeline.schedule.stages - 1 in pipeline.stages
    found = pipeline.step(
        inputs if reads_inputs else torch.zeros_like(inputs), targets if reads_targets else torch.zeros_like(targets)
    )
    wanted = loop.step(inputs, targets, seeds)
    problems = []
    if not same_bits(found, wanted) or pipeline.loss_sum is None or not same_bits(pipeline.loss_sum, loop.loss_sum):
        problems.append(f"loss {float(found)}, {float(wanted)} wanted")
    gradients = {name: each.grad for name, each in loop.module.named_parameters(remove_duplicate=False)}
    for name, each in pipeline.module.named_parameters():
        theirs = gradients[name]
        if each.grad is None or theirs is None:
            if each.grad is not theirs:
                problems.append(f"{name}: gradient {'missing' if each.grad is None else 'where none was wanted'}")
        elif not same_bits(each.grad, theirs):
            problems.append(f"{name}: gradient has other bits, by {distance(each.grad, theirs):.2e}")
    return problems


def states_apart(part: nn.Module, whole: nn.Module) -> list[str]:
    """Name what a rank holds that is not the whole model's of the same name."""
    wanted = whole.state_dict()
    return [f"{name} has other bits" for name, each in part.state_dict().items() if not same_bits(each, wanted[name])]
