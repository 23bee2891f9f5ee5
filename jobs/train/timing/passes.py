"""The parts of a training step that `layers.py` times: passes, their halves, updates, and recorded passes."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from muster.jobs.train.data import open_data
from muster.jobs.train.data.loading import move_inputs
from muster.jobs.train.models import model_of
from muster.jobs.train.models.stack import LayerStack
from muster.jobs.train.numerics import Numerics, numerics_of
from muster.jobs.train.timing.device import synchronize
from muster.pipe.layer_times import layer_times
from muster.pipe.splitting.halves import WeightQueue

if TYPE_CHECKING:
    from muster.jobs.spec.train import TrainSettings

LEAST_PASSES: Final = 3
MOST_PASSES: Final = 40
GPUS: Final = "cuda"
Parts = tuple[Callable[[], None], ...]


@dataclass
class TimedModel:
    """A model on its device, with an optimizer and batches."""

    settings: "TrainSettings"
    numerics: Numerics
    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: Callable[[int], tuple[Tensor, Tensor]]

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self.numerics.device


def subject_of(settings: "TrainSettings", device: torch.device) -> TimedModel:
    """Build the model, the optimizer and the data of a job, as its ranks do."""
    data, numerics = open_data(settings), numerics_of(settings, device)
    model = numerics.place(model_of(settings, vocabulary=data.vocabulary))
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def batch(size: int) -> tuple[Tensor, Tensor]:
        inputs, targets = data.train_batch(torch.arange(size) % data.train_samples, 0)
        return move_inputs(inputs, device, numerics.inputs), targets.to(device)

    return TimedModel(settings, numerics, model, numerics.optimizer(parameters, settings.optimizer), batch)


def passes_of(subject: TimedModel, size: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return functions that run a forward of `size` samples, and the backward of the last forward."""
    inputs, targets = subject.batch(size)
    losses: list[Tensor] = []

    def forward() -> None:
        losses[:] = [subject.numerics.loss(subject.model, inputs, targets)]

    def backward() -> None:
        losses.pop().backward()  # type: ignore[no-untyped-call]

    return forward, backward


def fits(subject: TimedModel, size: int) -> bool:
    """Return whether the device has memory for a pass of `size` samples."""
    try:
        for part in passes_of(subject, size):
            part()
    except torch.OutOfMemoryError:
        subject.model.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        return False
    return True


def updating(subject: TimedModel) -> Callable[[], None]:
    """Return a function that runs the optimizer's step, and the release of the gradients that follows."""
    for part in passes_of(subject, 1):
        part()
    gradients = [parameter.grad for parameter in subject.model.parameters()]

    def update() -> None:
        subject.optimizer.step()
        subject.optimizer.zero_grad(set_to_none=True)
        for parameter, gradient in zip(subject.model.parameters(), gradients, strict=True):
            parameter.grad = gradient

    return update


def layers_of(subject: TimedModel, inputs: Tensor) -> list[dict[str, Any]]:
    """Return the name, forward and backward seconds of every layer; none for a model that is no stack of layers."""
    if not isinstance(subject.model, LayerStack) or subject.numerics.autocast is not None:
        return []
    names = [name for name, _ in subject.model.named_children()]
    return [
        {"name": name, "forward_s": forward_s, "backward_s": backward_s}
        for name, (forward_s, backward_s) in zip(names, layer_times(subject.model, inputs), strict=True)
    ]


def host_s(subject: TimedModel, size: int) -> tuple[float, float, float]:
    """Return the seconds in which the host enqueues a forward, a backward and an update on a GPU; 0 on CPUs."""
    if subject.device.type != GPUS:
        return 0.0, 0.0, 0.0
    parts, took = (*passes_of(subject, size), updating(subject)), list[list[float]]()
    for _ in range(MOST_PASSES // 4):
        took.append([])
        for part in parts:
            synchronize(subject.device)
            begin = perf_counter()
            part()
            took[-1].append(perf_counter() - begin)
    forward, backward, update = (median(times) for times in zip(*took[1:], strict=True))
    return forward, backward, update


def replaying(*parts: Callable[[], None]) -> Callable[[], None]:
    """Return a function that replays these parts, recorded as one CUDA graph."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for _ in range(LEAST_PASSES):
            for part in parts:
                part()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for part in parts:
            part()

    def replay(_alive: Parts = parts) -> None:  # the graph reads the parts' inputs, which must not be freed
        graph.replay()

    return replay


def recorded_passes(subject: TimedModel, samples: Sequence[int], active: int) -> dict[tuple[int, int], Parts]:
    """Return functions that replay a forward, and a forward with its backward; none if they cannot be recorded.

    As in a step, the backward finds no gradients to add to.
    """
    found: dict[tuple[int, int], Parts] = {}
    try:
        for size in samples:
            forward, backward = passes_of(subject, size)
            clear = partial(subject.model.zero_grad, set_to_none=True)
            found[active, size] = replaying(forward), replaying(clear, forward, backward)
    except RuntimeError as error:
        print(f"passes are not recorded: {error}", file=sys.stderr)
        return {}
    return found


def halves_of(subject: TimedModel, size: int) -> list[float]:
    """Return the seconds of a backward, and of its two halves: for inputs and for weights. Empty if it has none.

    On GPUs, recorded passes are timed, and the two halves are taken to be equal.
    """
    if not isinstance(subject.model, LayerStack):
        return []
    if subject.device.type == GPUS:
        try:
            return _replayed_halves(subject, size)
        except RuntimeError as error:
            print(f"split backwards are not recorded: {error}", file=sys.stderr)
            return []
    forward, backward = passes_of(subject, size)
    whole, first, second = list[float](), list[float](), list[float]()
    for _ in range(2 * LEAST_PASSES):
        forward()
        whole.append(seconds_of(backward))
        queue = WeightQueue(subject.model)
        forward()
        with queue.collecting(0):
            first.append(seconds_of(backward))
        second.append(seconds_of(lambda: queue.run(0)))  # noqa: B023
        queue.restore()
    return [median(times[1:]) for times in (whole, first, second)]


def _replayed_halves(subject: TimedModel, size: int) -> list[float]:
    forward, backward = passes_of(subject, size)
    clear = partial(subject.model.zero_grad, set_to_none=True)
    took = [_replay_s(subject, replaying(*parts)) for parts in ((forward,), (clear, forward, backward))]
    with WeightQueue(subject.model) as queue:

        def halves() -> None:
            with queue.collecting(0):
                backward()
            queue.run(0)

        took.append(_replay_s(subject, replaying(clear, forward, halves)))
    half_s = (took[2] - took[0]) / 2
    return [took[1] - took[0], half_s, half_s]


def _replay_s(subject: TimedModel, replay: Callable[[], None]) -> float:
    times = []
    for _ in range(MOST_PASSES):
        begin = perf_counter()
        replay()
        synchronize(subject.device)
        times.append(perf_counter() - begin)
    return median(times)


def accumulating_s(subject: TimedModel, size: int) -> float:
    """Return the seconds in which a recorded backward adds to gradients that it finds; 0 on CPUs, whose passes add."""
    if subject.device.type != GPUS:
        return 0.0
    forward, backward = passes_of(subject, size)
    forward()
    backward()
    try:
        adding_s = _replay_s(subject, replaying(forward, backward))
        clear = partial(subject.model.zero_grad, set_to_none=True)
        return max(adding_s - _replay_s(subject, replaying(clear, forward, backward)), 0.0)
    except RuntimeError as error:
        print(f"passes are not recorded: {error}", file=sys.stderr)
        return 0.0


def seconds_of(work: Callable[[], None]) -> float:
    begin = perf_counter()
    work()
    return perf_counter() - begin


def loading_s(subject: TimedModel, size: int) -> float:
    took = []
    for _ in range(LEAST_PASSES):
        begin = perf_counter()
        subject.batch(size)
        took.append(perf_counter() - begin)
    return median(took)
