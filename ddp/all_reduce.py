"""Data parallel by all-reduce: one sum per parameter after the backward, divided by the number of ranks.

A ring all-reduce moves 2 (W - 1) / W of the gradient's bytes over each link, whatever W is; no rank is special. The
order of its sum belongs to the backend, so with three ranks or more the last bits may differ from one process. With
virtual shards the gradients are gathered and added in shard order on every rank instead: W times the bytes, and the
same bits on any number of ranks.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from ddp.base import DataParallel, mean_in_order


class AllReduce(DataParallel):
    """Average gradients with one all-reduce a parameter; in shard order when virtual shards are closed."""

    def _mean(self, gradient: Tensor) -> Tensor:
        dist.all_reduce(gradient, op=dist.ReduceOp.SUM, group=self.process_group)
        world_size = dist.get_world_size(self.process_group)
        return gradient if world_size == 1 else gradient.div_(world_size)

    def _ordered_mean(self, gradients: list[Tensor]) -> Tensor:
        mine = torch.stack(gradients)  # (shards, *parameter)
        gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size(self.process_group))]
        dist.all_gather(gathered, mine, group=self.process_group)
        return mean_in_order([shard for rank in gathered for shard in rank])
