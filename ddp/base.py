"""What every data-parallel wrapper here shares: equal starts, virtual shards, and a mean that is asked for.

The wrappers differ only in how one parameter's gradients become their mean. All of them are used in one way:

    model = AllReduce(module)                       # parameters and buffers are now those of rank 0
    model(inputs).sum().backward()
    model.finish_gradient_synchronization()         # .grad is now the mean over all shards
    optimizer.step()

A *virtual shard* is a slice of the batch whose gradient is kept apart, so that the sum can be taken in one order
whatever the number of ranks: shard s of rank r is number r * shards + s.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class DataParallel(nn.Module, ABC):
    """Wrap a module so that its gradients can be averaged over the ranks of a group.

    Building one is a collective: parameters (frozen ones too) and buffers are broadcast from the group's rank 0.
    """

    def __init__(self, module: nn.Module, process_group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.module = module
        self.process_group = process_group
        self._shards: list[list[Tensor]] = []  # closed virtual shards; each holds one gradient a parameter
        self._local = False
        broadcast([*module.parameters(), *module.buffers()], process_group)

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """Call the module; nothing is communicated."""
        return self.module(*inputs, **keywords)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it gradients only accumulate on this rank: finishing does nothing."""
        before, self._local = self._local, True
        try:
            yield
        finally:
            self._local = before

    def next_shard(self) -> None:
        """Close a virtual shard: call it after the shard's last backward, for the last shard too.

        Every rank must close the same number of shards before it finishes.
        """
        self._shards.append(self._take_gradients())

    def finish_gradient_synchronization(self) -> None:
        """Make every `.grad` the mean over all shards: over ranks, or over ranks x virtual shards if any was closed.

        A trainable parameter without a gradient counts as zeros, so that no rank waits for one that has none.

        Raises:
            RuntimeError: gradients were accumulated after the last closed shard.
        """
        if self._local:
            return
        shards, self._shards = self._shards, []
        if not shards:
            for parameter in self._trainable():
                parameter.grad = self._mean(_gradient(parameter))
            return
        if any(parameter.grad is not None for parameter in self._trainable()):
            raise RuntimeError("gradients after the last next_shard(): close every virtual shard, or none")
        for index, parameter in enumerate(self._trainable()):
            parameter.grad = self._ordered_mean([shard[index] for shard in shards])

    @abstractmethod
    def _mean(self, gradient: Tensor) -> Tensor:
        """Return the mean over ranks of one parameter's gradient."""

    @abstractmethod
    def _ordered_mean(self, gradients: list[Tensor]) -> Tensor:
        """Return the mean over ranks and shards, summed in the order of shard numbers and divided once."""

    def _trainable(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.module.parameters() if parameter.requires_grad]

    def _take_gradients(self) -> list[Tensor]:
        taken = [_gradient(parameter) for parameter in self._trainable()]
        for parameter in self._trainable():
            parameter.grad = None
        return taken


def _gradient(parameter: nn.Parameter) -> Tensor:
    """Return a parameter's gradient as one block of memory, zeros if it has none."""
    if parameter.grad is None:
        return torch.zeros_like(parameter, memory_format=torch.contiguous_format)
    return parameter.grad.contiguous()


def broadcast(tensors: list[Tensor], process_group: dist.ProcessGroup | None = None) -> None:
    """Overwrite tensors with those of the group's rank 0."""
    for tensor in tensors:
        whole = tensor.detach().contiguous()
        dist.broadcast(whole, group=process_group, group_src=0)
        if whole.data_ptr() != tensor.data_ptr():  # a permuted layout was sent as a copy
            tensor.detach().copy_(whole)


def mean_in_order(shards: list[Tensor]) -> Tensor:
    """Add tensors first to last, then divide once; the first is left as it was."""
    total = shards[0].clone()
    for shard in shards[1:]:
        total += shard
    return total if len(shards) == 1 else total.div_(len(shards))
