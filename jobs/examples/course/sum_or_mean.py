"""Summed against averaged gradients: what an all-reduce of four ranks' gradients does to one step of SGD.

    python jobs/examples/course/sum_or_mean.py

The mean is the gradient of the mean loss over the global batch, so the learning rate does not depend on the number of
ranks. A sum is that gradient times the number of ranks. Every mode of Muster averages, as PyTorch's DDP does.
"""

import torch
import torch.distributed as dist
from ranks import on_ranks

GRADIENTS = (0.8, -0.2, -0.7, 0.4)  # the gradients of ranks 0 to 3
WEIGHT, LR = 0.1, 0.1  # the weight that rank 0 broadcast


def work() -> None:
    """All-reduce and step in both ways."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    total = torch.tensor(GRADIENTS[rank], dtype=torch.float64)
    dist.all_reduce(total)  # the default is a sum
    if rank == 0:
        for name, gradient, lr in (
            ("sum", total, LR),
            ("mean", total / ranks, LR),
            ("mean", total / ranks, LR * ranks),
        ):
            print(
                f"{name:4}  gradient {gradient:6.3f}  lr {lr:.1f}  weight {WEIGHT:.1f} -> {WEIGHT - lr * gradient:.4f}"
            )


if __name__ == "__main__":
    on_ranks(4, work)
