"""Data parallel by all-reduce: one sum per parameter after the backward, divided by the number of ranks.

A ring all-reduce moves 2 (W - 1) / W of the gradient's bytes over each link, whatever W is; no rank is special. The
order of its sum belongs to the backend, so with three ranks or more the last bits may differ from one process. With
`exact` every rank sums its part of the gradient in order and hands the sum on: the same bytes, and the same bits on
any number of ranks.

Gradients of float16 are divided before they are summed, for the sum may not fit; all others after, which rounds once.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from muster.ddp.after_backward import AfterBackward
from muster.ddp.means import ordered_mean


class AllReduce(AfterBackward):
    """Average gradients with one all-reduce a parameter; with `exact` in shard order."""

    def _mean(self, gradients: list[Tensor]) -> Tensor:
        if self.exact:
            mean = torch.empty_like(gradients[0])
            ordered_mean([gradient.view(-1) for gradient in gradients], mean.view(-1), self.process_group)
            return mean
        (gradient,) = gradients
        overflows = gradient.dtype == torch.float16
        if overflows:
            gradient = gradient / self.ranks
        dist.all_reduce(gradient, op=dist.ReduceOp.SUM, group=self.process_group)
        return gradient if overflows else gradient.div_(self.ranks)
