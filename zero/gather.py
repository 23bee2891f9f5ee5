"""How the ranks' shards become whole parameters again. Each way starts a flat tensor and returns what to wait for."""

from abc import ABC, abstractmethod

import torch
import torch.distributed as dist
from torch import Tensor

from ddp.means import Group, Task, Wait, beside, thread_of
from ddp.primitives import ring_all_gather
from zero.flat import FlatParameters
from zero.scatter import all_gather


class Gather(ABC):
    """A way to whole tensors."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.ranks = dist.get_world_size(group)

    @abstractmethod
    def start(self, home: FlatParameters, shard: Tensor, out: Tensor) -> Wait:
        """Fill `out`, as long as the whole, with the ranks' shards; waiting twice is harmless."""


class RingGather(Gather):
    """A ring, by the group's thread."""

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self._thread = thread_of(group)

    def start(self, home: FlatParameters, shard: Tensor, out: Tensor) -> Wait:
        """Hand it to the thread."""
        parts = home.parts(out)
        task = Task(lambda: ring_all_gather(shard, parts, self.group))
        self._thread.tasks.put(task)
        return task.wait


class StreamGather(Gather):
    """The backend's all-gather, on a stream beside the computing one."""

    def __init__(self, group: Group, device: torch.device) -> None:
        super().__init__(group)
        self.stream = beside(device)

    def start(self, home: FlatParameters, shard: Tensor, out: Tensor) -> Wait:
        """Let the stream wait for the shard, then gather; waiting makes the computing stream wait."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            all_gather(out, shard, group=self.group)
            done = self.stream.record_event()
        return lambda: torch.cuda.current_stream().wait_event(done)


def gather_for(group: Group, device: torch.device) -> Gather:
    """Choose the way for a device."""
    return StreamGather(group, device) if device.type == "cuda" else RingGather(group)
