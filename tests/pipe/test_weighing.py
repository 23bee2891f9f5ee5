"""A pipeline's gradients on padded batches are those of the mean over the targets that count, in every schedule."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from muster.jobs.world.world import World
from muster.pipe import Pipeline
from muster.pipe.schedules.tables import schedule

pytestmark = pytest.mark.slow

SAMPLES, CLASSES = 6, 5
VALID = (0, 0, 4, 1, 3, 0)  # of four targets of each sample: the first micro-batch of three has padding only


class Swapped(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)  # (samples, classes, targets), as cross_entropy wants


def layers(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(1)
    shapes = [nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, CLASSES), Swapped()]
    return nn.Sequential(*shapes).to(dtype)


def batch(valid: tuple[int, ...], dtype: torch.dtype, ignored: int = -100) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    targets = torch.randint(CLASSES, (SAMPLES, 4), generator=generator)
    for target, length in zip(targets, valid, strict=True):
        target[length:] = ignored
    return torch.randn(SAMPLES, 4, 3, generator=generator).to(dtype), targets


def with_tensor(outputs: Tensor, targets: Tensor) -> Any:
    return functional.cross_entropy(outputs, targets, reduction="sum"), (targets != -100).sum()


def with_number(outputs: Tensor, targets: Tensor) -> Any:
    return functional.cross_entropy(outputs, targets, reduction="sum"), int((targets != -100).sum())


def plain_mean(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, targets)


LOSSES: dict[str, Any] = {
    "tensor": with_tensor,
    "number": with_number,
    "function": functional.cross_entropy,
    "module": nn.CrossEntropyLoss(label_smoothing=0.1),
    "other index": nn.CrossEntropyLoss(ignore_index=CLASSES + 1),
}


def difference(world: World, how: str, loss: str, valid: tuple[int, ...], more: dict[str, Any], steps: int) -> float:
    """Return how far the summed gradients of steps, and the losses, are from those of whole batches."""
    dtype = torch.float64
    own, whole = layers(dtype), layers(dtype)
    pipeline = Pipeline(own, schedule(how, world.size, 3), loss=LOSSES[loss], **more)
    judge = LOSSES[loss] if isinstance(LOSSES[loss], nn.Module) else functional.cross_entropy
    ignored = judge.ignore_index if isinstance(judge, nn.Module) else -100
    far = 0.0
    for step in range(steps):  # gradients add up over steps
        inputs, targets = batch(valid[step:] + valid[:step], dtype, ignored)
        wanted = judge(whole(inputs), targets)
        wanted.backward()
        far = max(far, abs(pipeline.step(inputs, targets) - wanted.detach()).item())
    named = dict(whole.named_parameters())
    for name, each in pipeline.module.named_parameters():
        assert each.grad is not None
        assert named[name].grad is not None
        far = max(far, (each.grad - named[name].grad).abs().max().item())
    return far


@pytest.mark.ranks
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(
    ("how", "more"),
    [("gpipe", {}), ("1f1b", {"recompute": True}), ("interleaved", {}), ("zbv", {})],
)
def test_padding_does_not_count(on_ranks, how, more, loss):
    found = on_ranks(2, difference, how=how, loss=loss, valid=VALID, more=more, steps=3)
    assert max(found) < 1e-12


def full(world: World) -> list[bool]:
    """Return whether counting targets leaves the bits of gradients of two full batches unchanged."""
    found = []
    for loss in (with_tensor, with_number, functional.cross_entropy):
        gradients = []
        for each in (loss, plain_mean):
            pipeline = Pipeline(layers(torch.float32), schedule("1f1b", world.size, 3), loss=each)
            losses = [pipeline.step(*batch((4,) * SAMPLES, torch.float32)) for _ in range(2)]
            gradients.append([*losses, *(each.grad for each in pipeline.module.parameters())])
        found.append(all(map(torch.equal, *gradients)))
    return found


@pytest.mark.ranks
def test_full_batches_keep_their_bits(on_ranks):
    assert on_ranks(2, full) == [[True] * 3] * 2


def nothing(world: World) -> list[float]:
    pipeline = Pipeline(layers(torch.float32), schedule("gpipe", world.size, 3), loss=with_tensor)
    loss = pipeline.step(*batch((0,) * SAMPLES, torch.float32))
    return [loss.item(), *(each.grad.abs().max().item() for each in pipeline.module.parameters())]


@pytest.mark.ranks
def test_a_batch_of_padding_has_no_loss_and_no_gradient(on_ranks):
    assert all(not any(numbers) for numbers in on_ranks(2, nothing))


def test_a_loss_that_returns_now_a_mean_and_now_a_pair_is_refused():
    kinds = iter([plain_mean, with_tensor, with_tensor])
    pipeline = Pipeline(layers(torch.float32), schedule("gpipe", 1, 3), loss=lambda *given: next(kinds)(*given))
    with pytest.raises(ValueError, match=r"pair \(sum, count\) in another; always return the same"):
        pipeline.step(*batch((4,) * SAMPLES, torch.float32))
