"""The process that times norms of one width and precision, which take turns with a copy of the same rows.

{"case": i, "build_s": s}, then {"case": i, "step": s} for each sample
{"case": i, "memory": why}, {"case": i, "refused": why}

forward    y = norm(x), without autograd
backward   y = norm(x), then the gradients of x and of the norm's parameters from that of y
copy       the rows of x

On GPUs, a sample is the replay of a CUDA graph of several calls, timed by events, so the host's work does not count.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from time import perf_counter
from typing import Final

import torch
from torch import Tensor, nn

from muster.jobs.basics.errors import RefusedError
from muster.jobs.node.page import Page
from muster.jobs.timing.settings import COPY, Case, TimingSettings
from muster.jobs.train.kernels.rms_norm import FusedRmsNorm, PlainRmsNorm, why_not_fused
from muster.jobs.train.numerics.numerics import ROWS
from muster.jobs.train.numerics.pieces import require_compiler
from muster.jobs.train.rng.keyed import SYNTHETIC, key
from muster.jobs.train.timing import memory
from muster.jobs.train.timing.device import claim, timed
from muster.jobs.world.forked import Tell

EPSILON: Final = 1e-5
CALLS: Final = 10  # in a CUDA graph
WARM_CALLS: Final = 3  # before a graph is recorded
KINDS: Final[dict[str, type[nn.Module]]] = {
    "layer": nn.LayerNorm,
    "rms": nn.RMSNorm,
    "rms_plain": PlainRmsNorm,
    "rms_compiled": PlainRmsNorm,
    "rms_fused": FusedRmsNorm,
}

Sample = Callable[[], float]


@dataclass(frozen=True)
class NormTask:
    """Rows that share a width and a precision, their device, and how much of a host's memory they may use."""

    settings: TimingSettings
    cases: Sequence[Case]
    device: torch.device
    allowed_bytes: int


def measure(task: NormTask, tell: Tell, page: Page) -> None:
    """Time every case in turns, in alternating order."""
    claim(task.device)
    memory.shield(task.device, task.allowed_bytes)
    samples: dict[int, Sample] = {}
    recorder, inputs = Recorder(task.device), cache(partial(draw_inputs, task))

    def build(index: int) -> None:
        began = perf_counter()
        samples[index] = recorder.sample_of(build_call(task.cases[index], *inputs()))
        tell({"case": index, "build_s": perf_counter() - began})

    def attempt(index: int, work: Callable[[], object]) -> None:
        page.beat()
        try:
            with memory.translating_errors(task.device):
                work()
        except memory.OutOfMemory as error:
            tell({"case": index, "memory": str(error)})
            samples.pop(index, None)
        except RefusedError as error:
            tell({"case": index, "refused": str(error)})

    for index in range(len(task.cases)):
        attempt(index, lambda index=index: build(index))  # type: ignore[misc]
    for turn in range(task.settings.warmup + task.settings.steps):
        for index in list(samples)[:: -1 if turn % 2 else 1]:
            attempt(index, lambda index=index: tell({"case": index, "step": samples[index]()}))  # type: ignore[misc]


def draw_inputs(task: NormTask) -> tuple[Tensor, Tensor]:
    """Draw the input of all cases, and the gradient of their output: (rows, width) each."""
    case, draw = task.cases[0], torch.Generator(task.device).manual_seed(key(task.settings.seed, SYNTHETIC))
    assert case.width is not None
    row, shape = ROWS[case.precision], (task.settings.batch, case.width)
    dtype = row.autocast or row.weights
    x, of_y = (torch.randn(shape, generator=draw, device=task.device).to(dtype) for _ in range(2))
    return x, of_y


def build_call(case: Case, x: Tensor, of_y: Tensor) -> Callable[[], object]:
    """Build a norm; return a function that runs one pass.

    Raises:
        RefusedError: if the norm cannot run here.
    """
    if case.model == COPY:
        target = torch.empty_like(x)
        return lambda: target.copy_(x)
    norm = KINDS[case.model](case.width, eps=EPSILON, device=x.device, dtype=x.dtype)
    if case.model == "rms_fused" and (why := why_not_fused(x)):
        raise RefusedError(why)
    if case.model == "rms_compiled":
        require_compiler(x.device)
        norm.compile(dynamic=False)
    if case.pass_name == "forward":
        return torch.no_grad()(lambda: norm(x))
    x = x.detach().requires_grad_()
    inputs: list[Tensor] = [x, *norm.parameters()]
    return lambda: torch.autograd.grad(norm(x), inputs, of_y)


class Recorder:
    """Turns calls into samples. The graphs of all calls share their memory, because they never run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def sample_of(self, call: Callable[[], object]) -> Sample:
        """Return a function that runs calls until the device has finished them, and returns the seconds of one."""
        if self.device.type != "cuda":
            return lambda: timed(call, self.device)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_CALLS):
                call()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            for _ in range(CALLS):
                call()

        def seconds() -> float:
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            before.record()
            graph.replay()
            after.record()
            after.synchronize()
            return 1e-3 * float(before.elapsed_time(after)) / CALLS

        return seconds
