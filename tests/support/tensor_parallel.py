"""What a split model must do, as functions that run on every rank and return what is wrong: [] if nothing is.

Tests and mutations run the same functions. The reference is one process that has all of the model, in float64.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from muster.jobs.models.shapes import GptShape
from muster.jobs.train.models.gpt import build_gpt
from muster.jobs.train.models.stack import LayerStack
from muster.jobs.train.models.tensor_plan import split_gpt
from muster.jobs.world.world import World
from muster.pipe.tensor.slices import TensorSlice
from muster.pipe.tensor.split import TensorParallel

WITHIN = 1e-10
BATCH, CONTEXT, VOCABULARY = 4, 8, 24
SHAPE: dict[str, Any] = {
    "name": "test",
    "d_model": 16,
    "d_ff": 32,
    "layers": 1,
    "heads": 4,
    "context": CONTEXT,
    "vocabulary": VOCABULARY,
    "tied": False,
    "bias": True,
    "norm": "layer",
}


@dataclass(frozen=True)
class Case:
    """A model, and how it is split; `sequence` is the dimension that sequences are split along."""

    tied: bool = False
    bias: bool = True
    norm: str = "layer"
    sequence: int | None = None
    dropout: float = 0.0
    attention_dropout: bool = True

    @property
    def shape(self) -> GptShape:
        return GptShape(**{**SHAPE, "tied": self.tied, "bias": self.bias, "norm": self.norm, "dropout": self.dropout})


CASES = [
    Case(sequence=sequence, **row)
    for sequence in (None, 0, 1)
    for row in ({}, {"tied": True, "bias": False, "norm": "rms"}, {"tied": True}, {"bias": False})
]


def build(case: Case, world: World | None = None, dtype: torch.dtype = torch.float64) -> LayerStack:
    """Build a model whose biases and norms are drawn too: a bias of zeros may be added twice."""
    model = build_gpt(case.shape, 5).to(dtype=dtype)
    if not case.attention_dropout:
        model.block1.attention.dropout = 0.0
    generator = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for each in model.parameters():
            each.add_(torch.randn(each.shape, generator=generator, dtype=torch.float64), alpha=0.1)
    return model if world is None else model.to(world.device)


def split(model: LayerStack, case: Case, world: World) -> TensorParallel:
    group = world.group if world.size > 1 else None
    if case.sequence is None:
        return split_gpt(model, group)
    return split_gpt(model, group, sequence_parallel=True, sequence_dimension=case.sequence)


def batch(step: int, device: torch.device, samples: int = BATCH) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    tokens = torch.randint(VOCABULARY, (2, samples, CONTEXT), generator=generator)
    return tokens[0].to(device), tokens[1].to(device)


def part_of(whole: Tensor, split: TensorParallel, name: str) -> Tensor:
    """Return this rank's part of a tensor that has a parameter's global shape."""
    cut = split.slices.get(name, TensorSlice(name, tuple(whole.shape)))
    return whole if cut.dimension is None else whole.narrow(cut.dimension, cut.start, cut.stop - cut.start)


def far(found: Tensor, wanted: Tensor, what: str, within: float) -> list[str]:
    if found.shape != wanted.shape:
        return [f"{what} is {list(found.shape)}, wanted {list(wanted.shape)}"]
    apart = float((found - wanted).abs().max())
    return [] if apart <= within else [f"{what} is off by {apart:.1e}"]


def wrong_training(
    world: World, case: Case, steps: int = 2, within: float = WITHIN, dtype: torch.dtype = torch.float64
) -> list[str]:
    """Losses, gradients and parameters of steps on micro-batches must be those of one process."""
    whole = build(case, world, dtype)
    made = split(copy.deepcopy(whole), case, world)
    model = made.module
    problems: list[str] = []
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (whole, model)]
    for step in range(steps):
        losses = []
        for each, optimizer in zip((whole, model), optimizers, strict=True):
            optimizer.zero_grad()
            torch.manual_seed(step)
            parts = [each(*batch(2 * step + micro, world.device)) for micro in range(2)]
            sum(parts[1:], parts[0]).backward()
            losses.append(torch.stack(parts).detach())
        problems += far(losses[1], losses[0], f"step {step}: the loss", within)
        problems += [f"step {step}: {each}" for each in wrong_gradients(whole, made, within)]
        for optimizer in optimizers:
            optimizer.step()
    for name, parameter in model.named_parameters():
        wanted = part_of(whole.get_parameter(name), made, name)
        problems += far(parameter.detach(), wanted.detach(), f"{name} at the end", within)
    return problems + wrong_copies(world, made)


def wrong_gradients(whole: nn.Module, made: TensorParallel, within: float) -> list[str]:
    problems = []
    for name, parameter in made.module.named_parameters():
        if name not in made.slices:
            problems.append(f"{name} is new")
            continue
        wanted = whole.get_parameter(name).grad
        assert wanted is not None
        if parameter.grad is None:
            problems.append(f"{name} has no gradient")
        else:
            problems += far(parameter.grad, part_of(wanted, made, name), f"{name}: gradient", within)
    return problems


def wrong_copies(world: World, made: TensorParallel) -> list[str]:
    """What is whole on every rank must have the same bits, and so its gradient."""
    problems = []
    for name, parameter in made.module.named_parameters():
        if name not in made.slices or made.slices[name].dimension is not None:
            continue
        for what, tensor in (("values", parameter.detach()), ("gradients", parameter.grad)):
            theirs = tensor.clone() if tensor is not None else torch.zeros_like(parameter)
            dist.broadcast(theirs, group=world.group, group_src=0)
            if tensor is None or not torch.equal(theirs, tensor):
                problems.append(f"{name}: {what} are not rank 0's")
    return problems


def wrong_evaluation(world: World, case: Case, within: float = WITHIN) -> list[str]:
    """Logits must be whole, and those of one process; the loss of an evaluation too."""
    whole = build(case, world).eval()
    model = split(build(case, world), case, world).module.eval()
    tokens, targets = batch(0, world.device)
    with torch.no_grad():
        return [
            *far(model(tokens), whole(tokens), "logits", within),
            *far(model(tokens, targets), whole(tokens, targets), "loss", within),
        ]


CHECKS: dict[str, Callable[..., list[str]]] = {"training": wrong_training, "evaluation": wrong_evaluation}
