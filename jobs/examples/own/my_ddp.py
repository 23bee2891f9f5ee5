"""A data-parallel wrapper with buckets: muster verify ../vgg11.yaml --with my_ddp.py:MyDDP"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class MyDDP(nn.Module):
    """Average gradients over all ranks, in buckets that are sent while the backward still runs."""

    def __init__(self, module: nn.Module, bucket_size_mb: float = 25.0) -> None:
        super().__init__()
        self.module = module
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor.detach(), src=0)
        trained = [each for each in module.parameters() if each.requires_grad]
        self.buckets = cut(trained[::-1], bucket_size_mb * 2**20)
        self.synchronizes = True
        for index, bucket in enumerate(self.buckets):
            for parameter in bucket:
                parameter.register_post_accumulate_grad_hook(lambda _, index=index: self.ready(index))
        self.begin()

    def begin(self) -> None:
        self.missing = [len(bucket) for bucket in self.buckets]
        self.sent: list[tuple[Any, Tensor]] = []

    def forward(self, *inputs: Any, **options: Any) -> Any:
        return self.module(*inputs, **options)

    def ready(self, index: int) -> None:
        if not self.synchronizes:
            return
        self.missing[index] -= 1
        while len(self.sent) < len(self.buckets) and self.missing[len(self.sent)] == 0:
            self.send()

    def send(self) -> None:
        """Start the next bucket. All ranks send buckets in the same order."""
        bucket = self.buckets[len(self.sent)]
        gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in bucket]
        flat = torch.cat([each.flatten() for each in gradients])
        self.sent.append((dist.all_reduce(flat, async_op=True), flat))

    def finish_gradient_synchronization(self) -> None:
        """Wait for every bucket, after the backward. The gradients are then the means over the ranks."""
        while len(self.sent) < len(self.buckets):  # a parameter in it was not used
            self.send()
        for bucket, (work, flat) in zip(self.buckets, self.sent, strict=True):
            work.wait()
            flat /= dist.get_world_size()
            for parameter, part in zip(bucket, flat.split([each.numel() for each in bucket]), strict=True):
                parameter.grad = part.view_as(parameter).clone()
        self.begin()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Return a context in which a backward only adds to the gradients."""
        self.synchronizes = False
        try:
            yield
        finally:
            self.synchronizes = True


def cut(parameters: list[nn.Parameter], limit: float) -> list[list[nn.Parameter]]:
    """Divide parameters into buckets of at most `limit` bytes; a larger parameter gets a bucket of its own."""
    buckets: list[list[nn.Parameter]] = []
    room = 0.0
    for parameter in parameters:
        size = parameter.numel() * parameter.element_size()
        if not buckets or size > room:
            buckets.append([])
            room = limit
        buckets[-1].append(parameter)
        room -= size
    return buckets
