"""A pipeline: muster verify ../gpt-nano.yaml --set train.model.tied=false --with my_pipeline.py:MyPipeline"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

MOST_DIMENSIONS = 8


class MyPipeline:
    """GPipe: a rank has a slice of the layers, and runs all forwards, then all backwards."""

    def __init__(self, layers: nn.Sequential, microbatches: int) -> None:
        self.rank, self.last = dist.get_rank(), dist.get_world_size() - 1
        cuts = [len(layers) * each // (self.last + 1) for each in range(self.last + 2)]
        self.stage = nn.Sequential(*list(layers)[cuts[self.rank] : cuts[self.rank + 1]])
        self.microbatches = microbatches
        self.like = next(layers.parameters()).detach()[:0]  # has the dtype and device of received tensors
        self.sending: list[tuple[Any, Tensor]] = []

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of this rank's layers."""
        return self.stage.parameters()

    def train_step(self, inputs: Tensor, targets: Tensor, loss: Callable[[Tensor, Tensor], Tensor]) -> float | None:
        """Compute the gradients of the mean loss over the batch; return the loss on the last rank."""
        parts = list(zip(inputs.chunk(self.microbatches), targets.chunk(self.microbatches), strict=True))
        done = [self.forward(*part, loss) for part in parts]
        for received, output in done:
            self.backward(received, output)
        for work, _ in self.sending:
            work.wait()
        self.sending.clear()
        return float(sum(output.detach() for _, output in done)) if self.rank == self.last else None

    def forward(self, inputs: Tensor, targets: Tensor, loss: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
        x = inputs if self.rank == 0 else self.receive(self.rank - 1).requires_grad_()
        y = self.stage(x)
        if self.rank == self.last:
            return x, loss(y, targets) / self.microbatches
        self.send(y.detach(), self.rank + 1)
        return x, y

    def backward(self, x: Tensor, y: Tensor) -> None:
        gradient = None if self.rank == self.last else self.receive(self.rank + 1)
        if y.requires_grad:  # a first stage may have nothing to train
            y.backward(gradient)
        if self.rank > 0:
            assert x.grad is not None
            self.send(x.grad, self.rank - 1)

    def send(self, tensor: Tensor, rank: int) -> None:
        """Start to send the shape, then the values; do not wait."""
        shape = torch.zeros(MOST_DIMENSIONS, dtype=torch.int64, device=tensor.device)
        shape[: tensor.dim()] = torch.tensor(tensor.shape)
        for each in (shape, tensor.contiguous()):
            self.sending.append((dist.isend(each, rank), each))

    def receive(self, rank: int) -> Tensor:
        shape = self.like.new_zeros(MOST_DIMENSIONS, dtype=torch.int64)
        dist.recv(shape, rank)
        tensor = self.like.new_empty([size for size in shape.tolist() if size])
        dist.recv(tensor, rank)
        return tensor
