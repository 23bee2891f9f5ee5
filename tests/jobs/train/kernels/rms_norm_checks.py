"""Checks of the fused RMSNorm, run in a process with Triton's interpreter, or on a GPU: prints what is wrong."""

import itertools
import sys
from collections.abc import Iterator

import torch
from torch import Tensor

from muster.jobs.train.kernels.rms_norm import FusedRmsNorm, rms_norm

SHAPES = [(1, 1), (3, 7), (5, 64), (2, 3, 100), (4, 1000), (1, 5000), (0, 8), (2, 0, 8), (33, 16), (40, 70)]
BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
EPS = 1e-5


def results(x: Tensor, weight: Tensor, dy: Tensor, *, fused: bool) -> list[Tensor]:
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    if fused:
        module = FusedRmsNorm(x.shape[-1], eps=EPS, device=x.device, dtype=weight.dtype)
        module.weight = torch.nn.Parameter(weight.detach())
        y, weight = module(x), module.weight
    else:
        y = rms_norm(x, weight, EPS)
    y.backward(dy)
    assert x.grad is not None
    assert weight.grad is not None
    return [y.detach(), x.grad, weight.grad]


def wrong(what: str, x: Tensor, weight: Tensor, dy: Tensor) -> Iterator[str]:
    """Compare with autograd in float64."""
    found = results(x, weight, dy, fused=True)
    wanted = results(x.double(), weight.double(), dy.double(), fused=False)
    r = (x.double().square().mean(-1, keepdim=True) + EPS).rsqrt()
    terms = float((r * dy.double() * weight).abs().max()) if x.numel() else 0.0  # dx is a difference, and may be near 0
    for name, one, other in zip(("y", "dx", "dg"), found, wanted, strict=True):
        if one.shape != other.shape or one.dtype != (weight.dtype if name == "dg" else x.dtype):
            yield f"{what}: {name} is {tuple(one.shape)} {one.dtype}"
        scale = max(1e-30, float(other.abs().max()), terms if name == "dx" else 0.0) if other.numel() else 1.0
        far = float((one.double() - other).abs().max()) / scale if other.numel() else 0.0
        if not far <= BOUNDS[x.dtype]:
            yield f"{what}: {name} is off by {far:.1e}"


def cases(device: str) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    for shape, dtype in itertools.product(SHAPES, BOUNDS):
        draw = torch.Generator(device).manual_seed(len(shape) + shape[-1])
        x, dy = (torch.randn(shape, generator=draw, device=device).to(dtype) for _ in range(2))
        weight = torch.randn(shape[-1], generator=draw, device=device)
        yield f"{shape} {dtype}", x, weight.to(dtype), dy
        if len(shape) == 3:
            yield f"{shape} {dtype}, weight in float32", x, weight, dy
    x, dy = torch.randn(2, 6, 40, device=device).unbind()
    one = torch.ones(40, device=device)
    yield "zero rows", torch.zeros_like(x), one, dy
    yield "tiny values", x * 1e-18, one, dy
    yield "huge values", x * 1e18, one, dy
    yield "transposed", torch.randn(40, 6, device=device).t(), one, torch.randn(40, 6, device=device).t()
    yield "every second column", torch.randn(6, 80, device=device)[:, ::2], one, dy
    yield "rows with gaps", torch.randn(6, 100, device=device)[:, :40], one, dy
    yield "expanded gradient", x, one, torch.ones(1, 1, device=device).expand(6, 40)


def main(device: str) -> None:
    """Print what is wrong, one line each."""
    torch.manual_seed(0)
    count = 0
    for case in cases(device):
        count += 1
        for line in wrong(*case):
            print(line)
    print(f"{count} cases")


if __name__ == "__main__":
    main(sys.argv[1])
