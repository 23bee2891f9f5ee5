"""Our own building blocks as operations, so that a learner sees why the library's are faster, or are not."""

import torch.distributed as dist
from torch import Tensor

from muster.collectives_bench.ranks.calls import (
    ROOT,
    FromRoot,
    Gathered,
    Overwritten,
    ReduceScattered,
    Setup,
    Summed,
    SummedAtRoot,
)
from muster.ddp import primitives


class RingAllReduce(Summed):
    """all_reduce as a ring of sends."""

    def start(self, later: bool) -> None:
        primitives.ring_all_reduce(self.buffer, self.group)


class RingReduceScatter(ReduceScattered):
    """reduce_scatter as a ring of sends."""

    def start(self, later: bool) -> None:
        primitives.ring_reduce_scatter(self.parts_of_input, self.output, self.group)


class RingAllGather(Gathered):
    """all_gather as a ring of sends."""

    def start(self, later: bool) -> None:
        primitives.ring_all_gather(self.input, self.places, self.group)


class TreeBroadcast(FromRoot):
    """broadcast along a binomial tree."""

    def start(self, later: bool) -> None:
        primitives.tree_broadcast(self.buffer, ROOT, self.group)


class TreeReduce(SummedAtRoot):
    """reduce along a binomial tree."""

    def start(self, later: bool) -> None:
        primitives.tree_reduce(self.buffer, ROOT, self.group)


class ExchangeReduceScatter(ReduceScattered):
    """reduce_scatter as an exchange and a sum in the order of ranks."""

    def start(self, later: bool) -> None:
        primitives.ordered_reduce_scatter(self.parts_of_input, self.output, self.group)


class GatherScatter(Overwritten):
    """The mean by way of the root, which gathers, adds in the order of ranks, divides, and scatters."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.others = [setup.buffer(setup.count) for _ in range(setup.ranks - 1)] if setup.rank == ROOT else []

    def buffers(self) -> list[Tensor]:
        return [self.buffer, *self.others]

    def start(self, later: bool) -> None:
        if self.ranks == 1:
            return
        is_root = self.rank == ROOT
        dist.gather(self.buffer, [self.buffer, *self.others] if is_root else None, group_dst=ROOT, group=self.group)
        for other in self.others:
            self.buffer += other
        if is_root:
            self.buffer /= self.ranks
        mine = self.others[0] if is_root else self.buffer  # the root has its mean already
        dist.scatter(mine, [self.buffer] * self.ranks if is_root else None, group_src=ROOT, group=self.group)

    def wrong(self) -> int:
        return self.pattern.wrong_sum(self.buffer, self.number, mean=True)
