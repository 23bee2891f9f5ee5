"""Data-parallel wrappers with one fault each, for `benchmarks/with_faults.py`."""

from collections import Counter
from collections.abc import Iterator, Sized
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from muster.jobs.examples.own.my_ddp import MyDDP


class NoBroadcast(MyDDP):
    """Leaves every rank with its own parameters."""

    def __init__(self, module: nn.Module, bucket_size_mb: float = 25.0) -> None:
        kept = [each.detach().clone() for each in module.parameters()]
        super().__init__(module, bucket_size_mb)
        for parameter, own in zip(module.parameters(), kept, strict=True):
            parameter.data.copy_(own)


class NoBuffers(MyDDP):
    """Broadcasts parameters only."""

    def __init__(self, module: nn.Module, bucket_size_mb: float = 25.0) -> None:
        kept = [each.clone() for each in module.buffers()]
        super().__init__(module, bucket_size_mb)
        for buffer, own in zip(module.buffers(), kept, strict=True):
            buffer.copy_(own)


class Sum(MyDDP):
    """Adds gradients, and does not divide."""

    def finish_gradient_synchronization(self) -> None:
        super().finish_gradient_synchronization()
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                parameter.grad *= dist.get_world_size()


class Leaving(MyDDP):
    """Keeps the gradients of some parameters as they are on this rank."""

    def left(self) -> list[nn.Parameter]:
        raise NotImplementedError

    def finish_gradient_synchronization(self) -> None:
        own = [(each, each.grad.clone()) for each in self.left() if each.grad is not None]
        super().finish_gradient_synchronization()
        for parameter, gradient in own:
            parameter.grad = gradient


class SkipsTied(Leaving):
    """Skips a parameter that two layers share."""

    def left(self) -> list[nn.Parameter]:
        uses = Counter(id(each) for _, each in self.module.named_parameters(remove_duplicate=False))
        return [each for each in self.module.parameters() if uses[id(each)] > 1]


class DropsOne(Leaving):
    """Skips the last parameter."""

    def left(self) -> list[nn.Parameter]:
        return [each for each in self.module.parameters() if each.requires_grad][-1:]


class OneByOne(MyDDP):
    """Takes a bucket size and sends each gradient by itself."""

    def __init__(self, module: nn.Module, bucket_size_mb: float = 25.0) -> None:
        super().__init__(module, 0.0)


class NoOverlap(MyDDP):
    """Sends all buckets after the backward."""

    def ready(self, index: int) -> None:
        pass


class Blocking(MyDDP):
    """Starts buckets in the backward, and waits for each at once."""

    def send(self) -> None:
        super().send()
        self.sent[-1][0].wait()


class LastMicroBatch(MyDDP):
    """Loses the gradients of all micro-batches but the last one."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        with super().no_sync():
            yield
        self.module.zero_grad()


class WaitsForever(MyDDP):
    """Skips the last bucket on rank 1 alone, so that the other ranks wait for it."""

    def finish_gradient_synchronization(self) -> None:
        if dist.get_rank() == 1:
            self.begin()
        else:
            super().finish_gradient_synchronization()
            dist.all_reduce(torch.zeros(1))


class Raises(MyDDP):
    """Raises on rank 1 in its second step."""

    steps = 0

    def finish_gradient_synchronization(self) -> None:
        super().finish_gradient_synchronization()
        self.steps += 1
        if self.steps == 2 and dist.get_rank() == 1:
            raise IndexError("bucket 7 of 6")


class SameData(MyDDP):
    """Deals all samples to every rank."""

    def sampler(self, dataset: Sized) -> list[int]:
        return list(range(len(dataset)))


class UnequalSteps(MyDDP):
    """Deals every rank its samples, and some ranks one more."""

    def sampler(self, dataset: Sized) -> list[int]:
        return list(range(len(dataset)))[dist.get_rank() :: dist.get_world_size()]


class LeavesUnused(MyDDP):
    """Gives no gradient to a parameter that this rank has not used, although others have."""

    def finish_gradient_synchronization(self) -> None:
        without = [each for bucket in self.buckets for each in bucket if each.grad is None]
        super().finish_gradient_synchronization()
        for each in without:
            each.grad = None
