"""Data parallel through rank 0: it gathers every gradient, averages them in rank order, and scatters the mean.

    rank 0   g0 <─┬── g1, g2, g3      gather: (W - 1) x gradient bytes into one link
             mean ─┴─> mean x 3       scatter: the same bytes out of it

The link of rank 0 is the bottleneck; in return the order of the sum is known: it has the bits of one process that
accumulates over the same shards, whether `exact` is asked for or not.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from muster.ddp.after_backward import AfterBackward
from muster.ddp.means import sum_in_order


class GatherScatter(AfterBackward):
    """Average gradients on rank 0, one parameter at a time."""

    collectives_each = 2

    def _mean(self, gradients: list[Tensor]) -> Tensor:
        is_root = dist.get_rank(self.process_group) == 0
        mine = torch.stack(gradients)  # (shards, *parameter)
        gathered = [torch.empty_like(mine) for _ in range(self.ranks)] if is_root else None
        dist.gather(mine, gathered, group=self.process_group, group_dst=0)
        mean = torch.empty_like(gradients[0])
        copies = None
        if gathered is not None:
            shards = [shard for rank in gathered for shard in rank]
            copies = [sum_in_order(shards).div_(len(shards))] * self.ranks
        dist.scatter(mean, copies, group=self.process_group, group_src=0)
        return mean
