"""Compare the kernel of the cross-entropy with torch, on a GPU or in Triton's interpreter: python … cpu|cuda."""

import itertools
import math
import sys
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from muster.jobs.train.kernels.cross_entropy_triton import fused_row_gradients
from muster.jobs.train.models.stack import plain_loss
from muster.jobs.train.numerics import loss as losses

BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 8e-3}


def wanted(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss and its gradient in float64."""
    x = logits.double().requires_grad_()
    loss = functional.cross_entropy(x, targets, reduction="sum")
    return loss.detach(), torch.autograd.grad(loss, x)[0]


def check(what: str, logits: Tensor, targets: Tensor) -> Iterator[str]:
    loss, gradient = wanted(logits, targets)
    found = fused_row_gradients(mine := logits.clone(), targets, ignored=-100)
    for name, one, other in (("loss", found, loss), ("gradient", mine, gradient)):
        far = float((one.double() - other).abs().max()) / max(1.0, float(other.abs().max()))
        if not far <= BOUNDS[logits.dtype]:
            yield f"{what}: the {name} is off by {far:.1e}"


def main(device: str) -> None:
    """Print what is wrong, one line each."""
    torch.manual_seed(0)
    cases = 0
    for (rows, classes), dtype in itertools.product(((1, 1), (5, 50), (2, 4096), (3, 5000), (4, 9000)), BOUNDS):
        logits = (4 * torch.randn(rows, classes, device=device)).to(dtype)
        targets = torch.randint(classes, (rows,), device=device)
        more = {"": logits, "huge ": logits * 1e4, "equal ": torch.zeros_like(logits)}
        if classes > 1:
            more["padded "] = logits.clone().index_fill_(1, (targets[:1] + 1) % classes, -math.inf)
            targets = targets.where(targets != (targets[0] + 1) % classes, targets[0])
        ignored = targets.clone()
        ignored[0] = -100
        for (name, each), labels in itertools.product(more.items(), (targets, ignored)):
            cases += 1
            for line in check(f"{name}({rows}, {classes}) {dtype}", each, labels):
                print(line)
    for bad in (math.nan, math.inf):
        logits = torch.randn(2, 5000, device=device).index_fill_(1, torch.tensor([7], device=device), bad)
        if math.isfinite(float(fused_row_gradients(logits, torch.tensor([1, 2], device=device), ignored=-100))):
            print(f"{bad} is not in the loss")
    if math.isfinite(float(fused_row_gradients(logits, torch.tensor([1, 5000], device=device), ignored=-100))):
        print("a target that is no class is not in the loss")
    losses.is_fused = lambda device: True
    head, x = nn.Linear(16, 50, device=device), torch.randn(9, 16, device=device, requires_grad=True)
    targets = torch.tensor([1, 2, -100, 3, 49, 0, -100, 7, 7], device=device)
    found = [
        [loss.detach(), *torch.autograd.grad(loss, [x, *head.parameters()])]
        for loss in (
            plain_loss(head, x, targets),
            losses.chunked_loss(head, x, targets, chunk_bytes=4 * 4 * 64, multiple=64),
        )
    ]
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
    print(f"{cases} cases")


if __name__ == "__main__":
    main(sys.argv[1])
