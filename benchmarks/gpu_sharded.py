"""The sharded sides of `gpu_throughput.py`: ways to hold optimizer state, gradients and parameters once over all GPUs.

    zero1, zero2, zero3   our ShardedDataParallel and its optimizer; with pure_bf16 its shards have float32 masters
    torch zero            PyTorch's DistributedDataParallel and ZeroRedundancyOptimizer
    torch fsdp            PyTorch's fully_shard of every block and of the whole; pure_bf16 means float32 parameters that
                          are gathered in bfloat16 (MixedPrecisionPolicy), with gradients that are summed in `reduce`

All are given fused optimizers. Blocks are the units of ours and of fully_shard.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

OURS = {"zero1": 1, "zero2": 2, "zero3": 3}
THEIRS = ("torch zero", "torch fsdp")
Kind = type[torch.optim.Optimizer]


def keeps_float32(kind: str) -> bool:
    """True for a side that is given float32 weights and makes bfloat16 of them itself."""
    return kind == "torch fsdp"


def wrap_sharded(
    side: str, module: nn.Module, kind: Kind, settings: dict[str, Any], *, bf16: bool, **options: Any
) -> tuple[nn.Module, Any]:
    """Return the wrapped module and its optimizer."""
    if side == "torch fsdp":
        sharded = _fully_sharded(module, bf16=bf16, **options)
        return sharded, kind(sharded.parameters(), **settings)
    from muster.zero import ShardedDataParallel

    model = ShardedDataParallel(module, stage=OURS[side], units=blocks_of(module), **options)  # type: ignore[arg-type]
    return model, model.optimizer(kind, **settings)


def _fully_sharded(module: nn.Module, *, bf16: bool, reduce: str = "bfloat16", **options: Any) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(next(module.parameters()).device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(torch.bfloat16, getattr(torch, reduce)) if bf16 else MixedPrecisionPolicy()
    for block in blocks_of(module):
        fully_shard(block, mesh=mesh, mp_policy=policy, **options)
    whole: nn.Module = fully_shard(module, mesh=mesh, mp_policy=policy, **options)
    return whole


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """List the blocks of a GPT; of another model there are none."""
    return [each for name, each in module.named_modules() if name.rpartition(".")[2].startswith("block")]
