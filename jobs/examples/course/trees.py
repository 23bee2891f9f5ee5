"""Tree reduce and tree broadcast on eight ranks, with the values after every step.

    python jobs/examples/course/trees.py

Both need log2(8) = 3 steps, because all senders of a step work at the same time. `ddp/primitives/trees.py` has both,
for tensors of any size and any number of ranks.
"""

import torch
import torch.distributed as dist
from ranks import on_ranks

from muster.ddp.primitives import tree_broadcast, tree_reduce

VALUES = (0.1, -0.2, -0.3, 0.5, -0.6, -0.1, 0.2, 0.3)  # the values of ranks 0 to 7


def show(what: str, value: torch.Tensor, holders: range) -> None:
    """Print the values of some ranks; a collective."""
    values = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(values, value)
    if dist.get_rank() == 0:
        print(f"{what:9} " + "  ".join(f"rank {rank}: {values[rank].item():4.1f}" for rank in holders), flush=True)


def work() -> None:
    """Reduce to rank 0, broadcast from it, and compare with the library."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    value = torch.tensor([VALUES[rank]], dtype=torch.float64)
    show("reduce", value, range(ranks))
    for distance in (1, 2, 4):
        if rank % (2 * distance) == 0:
            received = torch.empty_like(value)
            dist.recv(received, rank + distance)
            value += received
        elif rank % (2 * distance) == distance:
            dist.send(value, rank - distance)
        show("", value, range(0, ranks, 2 * distance))
    for distance in (4, 2, 1):
        if rank % (2 * distance) == 0:
            dist.send(value, rank + distance)
        elif rank % (2 * distance) == distance:
            dist.recv(value, rank - distance)
        show("broadcast" if distance == 4 else "", value, range(0, ranks, distance))
    wanted = torch.tensor([VALUES[rank]], dtype=torch.float64)
    tree_reduce(wanted)
    tree_broadcast(wanted)
    assert torch.equal(value, wanted)


if __name__ == "__main__":
    on_ranks(8, work)
