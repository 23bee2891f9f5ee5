"""Recomputation in a one-process pipeline keeps every bit, and runs forwards again only where it was asked to."""

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

from muster.pipe import Pipe

CHUNKS = 4


class Counted(nn.Module):
    """Counts its forwards that record gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.forwards = 0
        self.register_buffer("mean", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += torch.is_grad_enabled()
        self.mean.mul_(0.9).add_(0.1 * x.detach().abs().mean())
        return x / self.mean.clone()


def build(recompute: str) -> Pipe:
    torch.manual_seed(0)
    layers = nn.Sequential(
        *(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), Counted()),
        *(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(8, 3)),
    )
    return Pipe(layers, CHUNKS, devices=["cpu", "cpu"], recompute=recompute)


def trained(recompute: str) -> tuple[Pipe, list[Tensor]]:
    pipe, found = build(recompute), []
    torch.manual_seed(1)
    for _ in range(2):
        out = pipe(torch.randn(12, 6))
        out.square().mean().backward()
        found += [out.detach(), torch.rand(2)]  # the generator continues at the same place
    return pipe, found + [each.grad for each in pipe.parameters()] + list(pipe.buffers())


@pytest.mark.parametrize(("recompute", "again"), [("always", CHUNKS), ("except_last", CHUNKS - 1)])
def test_recomputation_changes_no_bit_and_runs_what_it_should(recompute: str, again: int) -> None:
    (never, wanted), (pipe, found) = trained("never"), trained(recompute)
    assert never.module[3].forwards == 2 * CHUNKS
    assert pipe.module[3].forwards == 2 * (CHUNKS + again)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_without_gradients_nothing_is_recomputed() -> None:
    pipe = build("always")
    with torch.no_grad():
        pipe(torch.randn(12, 6))
    assert pipe.module[3].forwards == 0


def saved_by(recompute: str) -> int:
    """Count the tensors that the layers' own operations save for the backward, before it begins."""
    pipe, saved = build(recompute), []

    class Saving(torch.autograd.Function):
        @staticmethod
        def forward(context, x: Tensor) -> Tensor:
            context.save_for_backward(kept := x.clone())
            saved.append(weakref.ref(kept))
            return x.clone()

        @staticmethod
        def backward(context, gradient: Tensor) -> Tensor:
            return gradient

    class Layer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Saving.apply(x)

    pipe.module[2] = Layer()
    out = pipe(torch.randn(12, 6))
    gc.collect()
    alive = sum(each() is not None for each in saved)
    out.sum().backward()
    return alive


def test_the_activations_within_stages_are_not_kept() -> None:
    assert [saved_by(how) for how in ("never", "except_last", "always")] == [CHUNKS, 1, 0]


def test_an_unknown_word_is_refused() -> None:
    with pytest.raises(ValueError, match="recompute must be 'always', 'except_last' or 'never', got True"):
        Pipe(nn.Sequential(nn.Linear(1, 1)), 1, devices=["cpu"], recompute=True)
