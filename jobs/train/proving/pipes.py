"""The probe of a pipeline class: the layers of each rank, the order in which it runs them, and the gradients."""

import time
from typing import Any, Final

import torch
from torch import Tensor, nn

from muster.jobs.train.proving import toys
from muster.jobs.train.proving.bench import Bench
from muster.jobs.train.proving.judging import distance, factor, few, kib, same

MICRO_BATCHES: Final = 4
SAMPLES: Final = 2 * toys.BATCH
SLOW_S: Final = 0.01  # pause in each forward, so that parallel stages overlap in time

Span = tuple[float, float]


class PipeWatch:
    """A record of each forward and backward of a pipeline's layers on this rank, in order, with times."""

    def __init__(self, layers: nn.Sequential) -> None:
        self.ran: list[str] = []
        self.order: list[str] = []  # "F" and "B" of this rank's first layer
        self.sizes: list[int] = []
        self.spans: list[Span] = []
        for name, layer in layers.named_children():
            layer.register_forward_pre_hook(self._before(name))
            layer.register_forward_hook(self._after(name))

    def _before(self, name: str) -> Any:
        def hook(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            if name not in self.ran:
                self.ran.append(name)
            if name == self.ran[0]:
                began = time.monotonic()
                time.sleep(SLOW_S)
                self.order.append("F")
                self.sizes.append(len(inputs[0]))
                self.spans.append((began, time.monotonic()))

        return hook

    def _after(self, name: str) -> Any:
        def hook(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            self.spans[-1] = (self.spans[-1][0], time.monotonic())
            if name == self.ran[0] and output.requires_grad:
                output.register_hook(lambda gradient: self.order.append("B"))  # type: ignore[no-untyped-call]

        return hook


def pipes(bench: Bench) -> None:
    """Check one step of a pipeline of toy layers."""
    layers, reference = (bench.place(toys.layers(0)) for _ in range(2))
    named, watched = dict(layers.named_parameters()), PipeWatch(layers)
    inputs, targets = (
        torch.cat(each) for each in zip(*(toys.batch(step, 0, bench.device) for step in range(2)), strict=True)
    )
    wanted_loss = toys.loss_of(reference(inputs), targets)
    wanted_loss.backward()  # type: ignore[no-untyped-call]
    with bench.own_code(0, "construction, before step"):
        pipeline = bench.user.build(layers, MICRO_BATCHES)
    mine = {id(each) for each in pipeline.parameters()}
    owned = [name for name, each in named.items() if id(each) in mine]
    with bench.own_code(0), bench.traffic.recording():
        loss = pipeline.train_step(inputs, targets, toys.loss_of)
    judge_division(bench, list(named), owned, watched)
    judge_order(bench, watched)
    judge_gradients(bench, {name: named[name].grad for name in owned}, dict(reference.named_parameters()))
    judge_loss(bench, loss, float(wanted_loss.detach()))
    starts = bench.traffic.starts()
    said = f"{len(starts)} messages on this rank, {kib(sum(each.size for each in starts))} of activations and gradients"
    bench.row("collectives", True if starts else None, said if starts else "no message is sent through Python")


def judge_division(bench: Bench, names: list[str], owned: list[str], watched: PipeWatch) -> None:
    """Check that every layer belongs to one rank, and runs only there."""
    owners = bench.everywhere(owned)
    counts = {name: sum(name in each for each in owners) for name in names}
    lost = [name for name, count in counts.items() if count == 0]
    double = [name for name, count in counts.items() if count > 1]
    said = f"{len(owned)} of {len(names)} parameters on this rank"
    if lost:
        said = f"parameters() lacks {few(lost)} on all ranks; return the parameters of the rank's layers"
    elif double:
        said = f"{len(double)} of {len(names)} parameters are on several ranks: {few(double)}"
    bench.row("layers-divided", not (lost or double), said)
    own = {name.partition(".")[0] for name in owned}
    foreign = [name for name in watched.ran if name not in own]
    said = f"ran layers of other ranks: {few(foreign)}" if foreign else f"{len(watched.ran)} layers run on this rank"
    bench.row("layers-run-once", None if lost or double else not foreign, said)


def judge_order(bench: Bench, watched: PipeWatch) -> None:
    """Check the size of micro-batches, and whether several are in flight at the same time."""
    size = SAMPLES // MICRO_BATCHES
    said = f"sizes of the micro-batches of a batch of {SAMPLES}: {watched.sizes}"
    bench.row("micro-batches-cut", set(watched.sizes) == {size} and len(watched.sizes) >= MICRO_BATCHES, said)
    ahead = [*watched.order, "B"].index("B")
    wanted = min(MICRO_BATCHES, bench.world.size - bench.world.rank)
    everybody = bench.everywhere((watched.spans, time.time() - time.monotonic()))
    offsets = [offset for _, offset in everybody]
    overlaps = overlapping([spans for spans, _ in everybody])
    one_clock = max(offsets) - min(offsets) < SLOW_S / 2
    said = f"{''.join(watched.order)} on this rank: {ahead} forward passes before the first backward, need {wanted}"
    if one_clock:
        said += f"; {overlaps} pairs of forward passes on two ranks overlap in time"
    is_full = ahead >= wanted and not (one_clock and overlaps == 0)
    bench.row("pipelined", None if len(watched.sizes) < 2 else is_full, said)


def overlapping(spans: list[list[Span]]) -> int:
    """Count the pairs of forward passes on two ranks that overlap in time."""
    return sum(
        begin < other_end and other_begin < end
        for rank, of_rank in enumerate(spans)
        for of_other in spans[rank + 1 :]
        for begin, end in of_rank
        for other_begin, other_end in of_other
    )


def judge_gradients(bench: Bench, found: dict[str, Tensor | None], wanted: dict[str, nn.Parameter]) -> None:
    """Check that the gradients are those of the mean loss over the batch."""
    wrong = {}
    for name, gradient in found.items():
        right = wanted[name].grad
        assert right is not None
        if gradient is None:
            wrong[name] = "missing"
        elif not same(gradient, right):
            ratio = factor(gradient, right)
            far = f"wrong, with a relative error of {distance(gradient, right):.1e}"
            wrong[name] = far if ratio is None else f"{ratio:.4g} times that of the mean loss over the batch"
    name, what = next(iter(wrong.items()), ("", ""))
    good = f"all {len(found)} gradients equal those of one process"
    said = f"{len(wrong)} of {len(found)} wrong; {name}: {what}" if wrong else good
    bench.row("gradients", not wrong, f"{said} ({MICRO_BATCHES} micro-batches)")


def judge_loss(bench: Bench, loss: Any, wanted: float) -> None:
    """Check the loss that `train_step` returns. At least one rank must return a loss."""
    losses = bench.everywhere(None if loss is None else float(loss))
    given = [each for each in losses if each is not None]
    if not given:
        bench.row("loss", False, "train_step returns no loss on any rank; the last rank must return it")
        return
    wrong = [each for each in given if abs(each - wanted) > 1e-5 * abs(wanted)]
    said = f"{wrong[0]:.6g}, but {wanted:.6g} in one process" if wrong else f"{wanted:.6g}, as in one process"
    bench.row("loss", not wrong, said)
