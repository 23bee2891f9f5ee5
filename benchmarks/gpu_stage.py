"""A rank on a GPU of its own: it joins the others and agrees with them on numbers."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist


class Stage:
    """One rank among the others; with `smoke` it computes on the CPU, only to see that a benchmark runs."""

    def __init__(self, *, smoke: bool, limit_s: float = 300.0) -> None:
        self.smoke = smoke
        self.rank, self.ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.device = torch.device("cpu") if smoke else torch.device("cuda", self.rank)
        limit = timedelta(seconds=limit_s)
        if smoke:
            torch.set_num_threads(1)  # ranks share the cores
            dist.init_process_group("gloo", timeout=limit)
        else:
            torch.cuda.set_device(self.device)
            dist.init_process_group("nccl", device_id=self.device, timeout=limit)
        self.control = dist.new_group(backend="gloo")  # whose messages wait for no GPU
        self.device_name = "cpu" if smoke else torch.cuda.get_device_name()

    def all(self, value: float) -> list[float]:
        """Tell every rank's number to all."""
        mine = torch.tensor([value], dtype=torch.float64)
        gathered = [torch.empty_like(mine) for _ in range(self.ranks)]
        dist.all_gather(gathered, mine, group=self.control)
        return [float(each) for each in gathered]

    def synchronize(self) -> None:
        """Wait for the device."""
        if not self.smoke:
            torch.cuda.synchronize()
