"""The process of one timing row, which builds the model as `train:` would, runs steps and reports the time of each.

{"build_s": s}, {"step": s} for each step, {"peak_bytes": n}; or {"memory": why}, {"refused": why}
{"gpu": name}, {"rate": [precision, side, FLOP/s]}      from a survey
{"own": {"parameters": n, "flops": [n, n], "context": n or null}}     from a survey, if train: is timed
{"layers": [...]}                                       for a table of dtypes

forward    model · loss
backward   zero gradients · model · loss · backward
step       zero gradients · model · loss · backward · optimizer
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from time import perf_counter

import torch
from torch import Tensor

from muster.jobs.basics.errors import RefusedError
from muster.jobs.models.shapes import IMAGE_CHANNELS
from muster.jobs.node.page import Page
from muster.jobs.timing.settings import CLASSES, Case, TimingSettings
from muster.jobs.train.data import Data, open_data
from muster.jobs.train.data.loading import move_inputs
from muster.jobs.train.memory.count import size_of_made
from muster.jobs.train.models import build_model, model_of
from muster.jobs.train.numerics import Numerics, numerics_of
from muster.jobs.train.numerics.optim import gradients_of
from muster.jobs.train.rng.keyed import SYNTHETIC, key
from muster.jobs.train.timing import memory
from muster.jobs.train.timing.device import claim, product_rate, synchronize, timed
from muster.jobs.world.forked import Tell

IMAGE_SIDE = 32


@dataclass(frozen=True)
class TimingTask:
    """One row, its device, and how much of a host's memory it may use."""

    settings: TimingSettings
    case: Case
    device: torch.device
    allowed_bytes: int


def measure(task: TimingTask, tell: Tell, page: Page) -> None:
    """Time the steps of a row."""
    claim(task.device)
    memory.shield(task.device, task.allowed_bytes)
    growth = memory.Growth(task.device)
    try:
        with memory.translating_errors(task.device):
            began = perf_counter()
            step = build_step(task)
            synchronize(task.device)
            tell({"build_s": perf_counter() - began})
            growth.forget_peak()
            for _ in range(task.settings.warmup + task.settings.steps):
                page.beat()
                tell({"step": timed(step, task.device)})
    except memory.OutOfMemory as error:
        tell({"memory": str(error)})
    except RefusedError as error:
        tell({"refused": str(error)})
    tell({"peak_bytes": growth.peak_bytes()})


def survey(settings: TimingSettings, device: torch.device, tell: Tell) -> None:
    """Report the name of the GPU, and the speed of matrix products in each precision."""
    claim(device)
    if device.type == "cuda":
        tell({"gpu": torch.cuda.get_device_name(device)})
    if settings.matmul and not settings.dtypes:
        for precision in dict.fromkeys(settings.precision):
            tell({"rate": [precision, *product_rate(precision, device)]})
    own = next((case for case in settings.cases() if case.is_own), None)
    if own is not None:
        with suppress(RefusedError):  # the rows of this model give the reason
            tell({"own": size_of_made(settings.training(own))})


def find_types(task: TimingTask, tell: Tell) -> None:
    """Report the dtypes of each layer in a step."""
    from muster.jobs.train.numerics.dtypes import dtype_rows

    claim(task.device)
    memory.shield(task.device, task.allowed_bytes)
    try:
        with memory.translating_errors(task.device):
            model, numerics, (inputs, targets) = build(task)
            tell({"layers": [asdict(row) for row in dtype_rows(model, inputs, targets, numerics)]})
    except (memory.OutOfMemory, RefusedError) as error:
        tell({"refused": str(error)})


def build(task: TimingTask) -> tuple[torch.nn.Module, Numerics, tuple[Tensor, Tensor]]:
    """Build a batch, and build the model as the loop of a `train:` job does."""
    training = task.settings.training(task.case)
    numerics = numerics_of(training, task.device)
    if task.case.is_own:
        data = open_data(training)
        model, batch = model_of(training, vocabulary=data.vocabulary), first_batch(task, data, numerics)
    else:
        vocabulary = CLASSES if task.case.is_image else task.settings.vocabulary
        model = build_model(training.model, vocabulary=vocabulary, seed=training.seed)
        batch = random_batch(task, numerics)
    return numerics.place(model), numerics, batch


def first_batch(task: TimingTask, data: Data, numerics: Numerics) -> tuple[Tensor, Tensor]:
    """Read the first samples of a job's data, repeated if there are too few."""
    inputs, targets = data.train_batch(torch.arange(task.settings.batch) % data.train_samples, 0)
    return move_inputs(inputs, task.device, numerics.inputs), targets.to(task.device)


def random_batch(task: TimingTask, numerics: Numerics) -> tuple[Tensor, Tensor]:
    """Generate a batch of tokens and next tokens, or of images and classes, the same for every row of a model."""
    settings, draw = task.settings, torch.Generator().manual_seed(key(task.settings.seed, SYNTHETIC))
    if task.case.is_image:
        images = torch.randn(settings.batch, IMAGE_CHANNELS, IMAGE_SIDE, IMAGE_SIDE, generator=draw)
        classes = torch.randint(CLASSES, (settings.batch,), generator=draw)
        return images.to(task.device, numerics.inputs), classes.to(task.device)
    shape = (settings.batch, settings.context + 1)
    tokens = torch.randint(settings.vocabulary, shape, generator=draw).to(task.device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()  # (batch, context) each


def build_step(task: TimingTask) -> Callable[[], None]:
    """Build a row's model, batch and optimizer; return a function that runs one step."""
    model, numerics, (inputs, targets) = build(task)
    if task.case.pass_name == "forward":
        return lambda: _drop(numerics.loss(model, inputs, targets))
    scaler = numerics.scaler()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def backward() -> None:
        model.zero_grad(set_to_none=True)
        torch.autograd.backward(scaler.scaled(numerics.loss(model, inputs, targets)))

    if task.case.pass_name == "backward":
        return backward
    optimizer = numerics.optimizer(parameters, task.settings.training(task.case).optimizer)

    def step() -> None:
        backward()
        scaler.prepare(gradients_of(parameters), None)
        scaler.advance(optimizer)

    return step


def _drop(loss: Tensor) -> None:
    """Free a loss, and the tensors saved for its backward."""
