"""Check the fused norms in Triton's interpreter or on a GPU, and print one line for each wrong result."""

import itertools
import sys
from collections.abc import Iterator

import torch
from torch import Tensor

from muster.jobs.train.kernels import layer_norm
from muster.jobs.train.kernels.layer_norm import FusedLayerNorm
from muster.jobs.train.kernels.rms_norm import FusedRmsNorm, rms_norm

SHAPES = [(1, 1), (3, 7), (5, 64), (2, 3, 100), (4, 1000), (1, 5000), (0, 8), (2, 0, 8), (33, 16), (40, 70)]
LAYER_SHAPES = [(3, 7), (2, 3, 100), (1, 1600), (0, 8), (33, 16)]
NARROWER = {(1, 5000): (1, 1100), (1, 1600): (1, 70)}  # in the interpreter, where width takes time
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
        if device == "cpu" and dtype != torch.float32:
            shape = NARROWER.get(shape, shape)
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


def layer_results(module: torch.nn.Module, x: Tensor, dy: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    y = module(x)
    y.backward(dy.to(y.dtype))
    assert x.grad is not None
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    assert len(gradients) == 2
    return [y.detach(), x.grad, *gradients]


def wrong_layers(device: str) -> Iterator[str]:
    """Compare LayerNorm in float32, in 16 bits, and from float32 to 16 bits with PyTorch's in float64."""
    types = [(torch.float32, False), (torch.float32, True), (torch.bfloat16, False)]
    for shape, (dtype, narrow) in itertools.product(LAYER_SHAPES, types):
        if device == "cpu":
            shape = NARROWER.get(shape, shape)
        draw = torch.Generator(device).manual_seed(shape[-1])
        x, dy = (torch.randn(shape, generator=draw, device=device) for _ in range(2))
        x = (2.0 * x + 3.0).to(dtype)
        module = FusedLayerNorm(shape[-1], eps=EPS, narrow=narrow, device=device)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.copy_(torch.randn(shape[-1], generator=draw, device=device))
        wanted_type = torch.bfloat16 if narrow else dtype
        dy = dy.to(wanted_type)
        with torch.autocast(device, torch.bfloat16, enabled=narrow):
            found = layer_results(module, x, dy)
        reference = torch.nn.LayerNorm(shape[-1], eps=EPS, device=device, dtype=torch.float64)
        reference.load_state_dict(module.state_dict())
        wanted = layer_results(reference, x.double(), dy)
        for name, one, other in zip(("y", "dx", "dg", "db"), found, wanted, strict=True):
            scale = max(1e-30, float(other.abs().max())) if other.numel() else 1.0
            far = float((one.double() - other).abs().max()) / scale if other.numel() else 0.0
            bound = BOUNDS[one.dtype] * (10 if one.dtype == torch.float32 else 1)  # the mean of x is not 0
            if not far <= bound or one.shape != other.shape or (name == "y" and one.dtype != wanted_type):
                yield f"LayerNorm {shape} {dtype} to {wanted_type}: {name} is {one.dtype}, off by {far:.1e}"


def main(device: str) -> None:
    """Print what is wrong, one line each."""
    torch.manual_seed(0)
    layer_norm.MIN_ELEMENTS = 0
    for line in wrong_layers(device):
        print(line)
    count = 0
    for case in cases(device):
        count += 1
        for line in wrong(*case):
            print(line)
    print(f"{count} cases")


if __name__ == "__main__":
    main(sys.argv[1])
