"""Shared by the benchmarks of `ddp`: the two models, the three ways of wrapping them, and a rank's batches.

vgg11     9.2 M parameters (37 MB), images of 32x32, 8 a rank; 16 tensors of batch norm's statistics
gpt-5m    5.0 M parameters (20 MB), width 256, 6 blocks of 4 heads, 1024 of MLP, 1024 words; 2 x 128 tokens a rank

ours             BucketedDDP
torch            DistributedDataParallel(gradient_as_bucket_view=True), its broadcast of buffers off, as ours has none
torch, buffers   the same as torch has it by default: rank 0's buffers are broadcast in every forward
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from muster.ddp import BucketedDDP
from muster.jobs.models.shapes import VGG_SHAPES, GptShape, VggShape
from muster.jobs.train.models.gpt import build_gpt
from muster.jobs.train.models.vgg import build_vgg

GPT_5M = GptShape("gpt-5m", 256, 1024, 6, 4, vocabulary=1024)


@dataclass(frozen=True)
class Task:
    """A model and a rank's share of a batch."""

    shape: VggShape | GptShape
    samples: int  # of one rank in a step

    def build(self) -> nn.Module:
        """Return the model, the same on every rank."""
        return build_vgg(self.shape, 0) if isinstance(self.shape, VggShape) else build_gpt(self.shape, 0)

    def batches(self, rank: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield a rank's batches, the same ones whoever asks."""
        generator = torch.Generator().manual_seed(1000 + rank)
        while True:
            if isinstance(self.shape, VggShape):
                inputs = torch.randn(self.samples, 3, 32, 32, generator=generator)
                yield inputs, torch.randint(self.shape.classes, (self.samples,), generator=generator)
            else:
                size = (self.samples, self.shape.context + 1)
                tokens = torch.randint(self.shape.vocabulary, size, generator=generator)
                yield tokens[:, :-1], tokens[:, 1:]


TASKS = {"vgg11": Task(VGG_SHAPES["vgg11"], 8), "gpt-5m": Task(GPT_5M, 2)}
TINY = {
    "vgg11": Task(replace(VGG_SHAPES["vgg11"], layers=(8, 0, 8, 0, 8, 0, 8, 0, 8, 0)), 2),
    "gpt-5m": Task(replace(GPT_5M, d_model=16, d_ff=32, layers=2, context=16), 2),
}


def _torch(buffers: bool) -> Callable[..., nn.Module]:
    def wrap(module: nn.Module) -> nn.Module:
        # torch 2.13 renamed the switch and warns about the old name.
        known = inspect.signature(DistributedDataParallel.__init__).parameters
        switch = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        options: dict[str, Any] = {} if buffers else {switch: False}
        return DistributedDataParallel(module, gradient_as_bucket_view=True, **options)

    return wrap


WRAPPERS: dict[str, Callable[..., nn.Module]] = {
    "ours": BucketedDDP,
    "torch": _torch(buffers=False),
    "torch, buffers": _torch(buffers=True),
}


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of a batch."""
    return cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


class Loop:
    """A wrapped model with its optimizer, AdamW in one fused kernel, and the batches that it goes through."""

    def __init__(self, module: nn.Module, wrapper: str, batches: Iterator[tuple[Tensor, Tensor]]) -> None:
        self.model = WRAPPERS[wrapper](module)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.batches = batches

    def step(self) -> None:
        """Train on one batch."""
        inputs, targets = next(self.batches)
        self.optimizer.zero_grad()
        loss_of(self.model, inputs, targets).backward()
        self.optimizer.step()

    def weights(self) -> Tensor:
        """Return all parameters, end to end."""
        return torch.cat([parameter.detach().flatten() for parameter in self.model.parameters()])

    def gradients(self) -> Tensor:
        """Return all gradients, end to end."""
        return torch.cat([each.grad.flatten() for each in self.model.parameters() if each.grad is not None])
