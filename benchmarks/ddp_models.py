"""The models of the benchmarks of `ddp` and `zero`, and a rank's batches.

vgg11     9.2 M parameters (37 MB), images of 32x32, 8 a rank; 16 tensors of batch norm's statistics
gpt-5m    5.0 M parameters (20 MB), width 256, 6 blocks of 4 heads, 1024 of MLP, 1024 words; 2 x 128 tokens a rank
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

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


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of a batch."""
    return cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
