"""Call a function on several ranks of this machine: processes in one gloo group, forked from this one."""

import tempfile
from collections.abc import Callable

import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes


def _rank(rank: int, work: Callable[[], None], ranks: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    work()
    dist.destroy_process_group()


def on_ranks(ranks: int, work: Callable[[], None]) -> None:
    """Call `work()` on every rank, and wait for all."""
    with tempfile.TemporaryDirectory() as folder:
        start_processes(_rank, (work, ranks, f"{folder}/store"), ranks, start_method="fork")
