"""Measure how long slices of sequences take on a stage, as a function of their first token and their length."""

from itertools import pairwise
from statistics import median
from typing import Final

import torch
from torch import Tensor, nn

from muster.pipe.marks import marks_for
from muster.pipe.rng_streams import Hooks
from muster.pipe.schedules.slicing import SliceTimes
from muster.pipe.stage import Stage
from muster.pipe.token_slices import SlicedPasses

CUTS: Final = (1, 2, 4, 8)  # numbers of slices that are measured
ROUNDS: Final = 3  # after one warm-up round


def slice_times(layers: nn.Sequential, x: Tensor) -> SliceTimes:
    """Measure forward and backward of a stage by slices; fit the three numbers of `SliceTimes` by least squares.

    `x` (samples, tokens, ...) is the stage's input for one micro-batch. The layers get no gradients, and must neither
    draw random numbers nor write buffers.
    """
    measured: dict[tuple[int, int], list[float]] = {}
    for count in CUTS:
        if x.shape[1] >= count:
            tokens = [each.shape[1] for each in x.tensor_split(count, dim=1)]
            for turn in range(1 + ROUNDS):
                for slice_, seconds in _once(layers, x, tokens).items():
                    measured.setdefault(slice_, []).extend([seconds] if turn else [])
    slices = list(measured)
    columns = torch.tensor([[1.0, n, n * (begin + n)] for begin, n in slices], dtype=torch.float64)
    medians = torch.tensor([[median(measured[each])] for each in slices], dtype=torch.float64)
    scale = columns.amax(0)  # columns of very different magnitudes would lose precision
    found = torch.linalg.lstsq(columns / scale, medians).solution[:, 0] / scale
    return SliceTimes(*(max(0.0, each) for each in found.tolist()))


def _once(layers: nn.Sequential, x: Tensor, tokens: list[int]) -> dict[tuple[int, int], float]:
    """Return the seconds of every slice, by its begin and length."""
    stage = Stage(0, 0, list(layers._modules.items()), Hooks())
    stage._met.add(stage.layers[0].training)  # not a first forward, which would also copy the input
    passes, marks = SlicedPasses(tokens), marks_for(x.device)
    before = [(each, each.grad) for each in layers.parameters()]
    for each, _ in before:
        each.grad = None
    times, running = [marks.now()], []
    with torch.enable_grad():
        for index, part in enumerate(torch.split(x.detach(), tokens, dim=1)):
            own = passes.make(stage, index)
            running.append((own, own.forward(part.requires_grad_(), None)))
            times.append(marks.now())
        for own, output in reversed(running):
            own.backward(torch.ones_like(output))
            times.append(marks.now())
    for each, gradient in before:
        each.grad = gradient
    at = marks.seconds(times)
    spans = [end - begin for begin, end in pairwise(at)]
    begins = [sum(tokens[:index]) for index in range(len(tokens))]
    both = zip(spans[: len(tokens)], reversed(spans[len(tokens) :]), strict=True)
    return {place: sum(pair) for place, pair in zip(zip(begins, tokens, strict=True), both, strict=True)}
