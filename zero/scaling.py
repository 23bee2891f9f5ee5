"""Gradient scaling against underflow with shards: if the shard of one rank contains an infinity, all ranks skip the
step.

`torch.amp.GradScaler` reads the `.grad` of parameters, so it works for a `ShardedOptimizer` without a wrapper. With a
wrapper, gradients exist only as shards, which `ShardedGradScaler` reads.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from muster.ddp.checks import device_of
from muster.zero.segments import SegmentedOptimizer


def overflow(optimizer: SegmentedOptimizer, stepped: Sequence[Tensor]) -> bool:
    """If a GradScaler has called the step, unscale the gradients of `stepped`. Return True if all ranks must skip the
    step.

    With a GradScaler this is a collective, so that all ranks skip together. The unscaled gradients are copies in the
    dtype of the stepped tensors, so gradients of float16 parameters with masters are unscaled in float32.
    """
    given = getattr(optimizer, "found_inf", None)
    if given is None:
        return False
    found = torch.as_tensor(given, dtype=torch.float32).to(device_of(optimizer.group), copy=True)
    scale: Tensor | None = getattr(optimizer, "grad_scale", None)
    for each in stepped:
        if each.grad is not None:
            if scale is not None:
                each.grad = each.grad / scale.to(each.device)
            found += (~each.grad.isfinite().all()).to(found)
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=optimizer.group)
    return bool(found)


class ShardedGradScaler(torch.amp.GradScaler):
    """A `torch.amp.GradScaler` that unscales shards of gradients, and checks the shards of all ranks for infinities."""

    def _unscale_grads_(self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool) -> Any:
        shards: list[Tensor] = optimizer.gradients()
        found = torch.zeros_like(found_inf)
        for shard in shards:
            torch._amp_foreach_non_finite_check_and_unscale_([shard], found, inv_scale)
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=optimizer.group)
        return {found.device: found}
