"""Time LayerNorm and RMSNorm of torch, of torch.compile and as fused Triton kernels, beside a copy of the same rows.

    python jobs/examples/kernels/norms.py                                                   on a GPU
    python jobs/examples/kernels/norms.py --norms layer,rms --widths 256,1000 --rows 1000   without one

A norm computes so little that the memory's bandwidth limits it. A forward reads x and writes y, as many bytes as a
copy of x. Forward and backward together move 2.5 times as many: x and y, then x, dy and dx. So the table compares the
bytes per second of each norm with those of the copy. The norms of one width and dtype take turns with the copy, so that
other load on the machine slows all of them. On a GPU a sample is a CUDA graph of ten calls, so the host's work does not
count.
"""

import argparse
from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from muster.jobs.basics.errors import RefusedError
from muster.jobs.train.kernels.rms_norm import FusedRmsNorm, rms_norm, why_not_fused
from muster.jobs.train.numerics.pieces import require_compiler

EPSILON = 1e-5
CALLS = 10  # in a CUDA graph
WARM_UP = 3  # samples that do not count
MOVED = {"forward": 2, "both": 5}  # the least number of times that a pass reads or writes as many bytes as x has
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Key = tuple[str, str]  # a norm or "copy", and a pass
Call = Callable[[], object]


class PlainRmsNorm(nn.RMSNorm):
    """RMSNorm in plain PyTorch, for torch.compile."""

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, EPSILON)


NORMS: dict[str, type[nn.Module]] = {
    "layer": nn.LayerNorm,
    "rms": nn.RMSNorm,
    "rms_compiled": PlainRmsNorm,
    "rms_fused": FusedRmsNorm,
}


def measure(x: Tensor, names: Sequence[str], samples: int) -> dict[Key, float]:
    """Return the seconds of each pass of each norm on x (rows, width), and of a copy; leave out what cannot run."""
    torch.compiler.reset()  # else the norm of a later width would exceed the limit of recompilations, and run eagerly
    target, dy = torch.empty_like(x), torch.randn_like(x)
    calls: dict[Key, Call] = {("copy", "forward"): lambda: target.copy_(x)}
    for name in names:
        try:
            norm = build(name, x)
        except RefusedError as error:
            print(f"{name} is left out: {error}")
            continue
        calls[name, "forward"], calls[name, "both"] = forward_of(norm, x), both_of(norm, x, dy)
    pool = torch.cuda.graph_pool_handle() if x.is_cuda else None  # never two graphs at the same time, so they share it
    timers = {key: graph_timer(call, pool) if x.is_cuda else host_timer(call) for key, call in calls.items()}
    seconds: dict[Key, list[float]] = {key: [] for key in timers}
    for turn in range(WARM_UP + samples):
        for key in list(timers)[:: -1 if turn % 2 else 1]:
            seconds[key].append(timers[key]())
    return {key: median(each[WARM_UP:]) for key, each in seconds.items()}


def forward_of(norm: nn.Module, x: Tensor) -> Call:
    """Return a call of the forward, without autograd."""
    return torch.no_grad()(lambda: norm(x))


def both_of(norm: nn.Module, x: Tensor, dy: Tensor) -> Call:
    """Return a call of the forward and the backward, which computes the gradients of x and of the norm's parameters."""
    leaf = x.detach().requires_grad_()
    inputs = [leaf, *norm.parameters()]
    return lambda: torch.autograd.grad(norm(leaf), inputs, dy)


def build(name: str, x: Tensor) -> nn.Module:
    """Build a norm of the rows of x, or raise RefusedError if it cannot run on them."""
    if name == "rms_fused" and (why := why_not_fused(x)):
        raise RefusedError(why)
    norm = NORMS[name](x.shape[-1], eps=EPSILON, device=x.device, dtype=x.dtype)
    if name == "rms_compiled":
        require_compiler(x.device)
        norm.compile(dynamic=False)
    return norm


def host_timer(call: Call) -> Callable[[], float]:
    """Return a function that runs a call on the CPU and returns its seconds."""

    def sample() -> float:
        began = perf_counter()
        call()
        return perf_counter() - began

    return sample


def graph_timer(call: Call, pool: Any) -> Callable[[], float]:
    """Record calls as a CUDA graph; return a function that replays it and returns the seconds of one call."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        for _ in range(CALLS):
            call()

    def sample() -> float:
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        graph.replay()
        after.record()
        after.synchronize()
        return 1e-3 * float(before.elapsed_time(after)) / CALLS

    return sample


def main() -> None:
    """Time every width and dtype, and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--norms", type=lambda text: text.split(","), default=list(NORMS))
    parser.add_argument("--widths", type=lambda text: list(map(int, text.split(","))), default=[1024, 4096, 8192, 5000])
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--dtypes", type=lambda text: text.split(","), default=["fp32", "bf16"])
    parser.add_argument("--samples", type=int, default=20)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(f"{'norm':>12} {'width':>7} {'dtype':>6} {'pass':>8} {'ms':>9} {'GB/s':>9} {'of the copy':>12}")
    for dtype in args.dtypes:
        for width in args.widths:
            x = torch.randn(args.rows, width, device=device).to(DTYPES[dtype])
            times = measure(x, args.norms, args.samples)
            for (name, each), seconds in times.items():
                rate = MOVED[each] * x.nbytes / seconds
                share = rate / (MOVED["forward"] * x.nbytes / times["copy", "forward"])
                print(
                    f"{name:>12} {width:>7} {dtype:>6} {each:>8} {1e3 * seconds:9.4f} {1e-9 * rate:9.4g} {share:12.3f}"
                )


if __name__ == "__main__":
    main()
