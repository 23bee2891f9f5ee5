"""A right wrapper on a machine that has too much other work: rank 1 shares a core with busy processes."""

import os
import subprocess
import sys
import time

import torch.distributed as dist
from torch import nn

BUSY = 6
CPU_S = 0.6
# A busy process dies with the one that started it.
SPINNING = "import ctypes; ctypes.CDLL(None).prctl(1, 9)\nwhile True: pass"


class Starved(nn.Module):
    """A wrapper that averages gradients after the backward. Its construction needs CPU_S of a core that is shared."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        for each in [*module.parameters(), *module.buffers()]:
            dist.broadcast(each.detach(), src=0)
        if dist.get_rank() == 1:
            compute_on_a_shared_core()
        dist.barrier()  # rank 0 waits here

    def forward(self, inputs):
        return self.module(inputs)

    def finish_gradient_synchronization(self) -> None:
        for each in self.module.parameters():
            if each.requires_grad:
                each.grad = each.new_zeros(each.shape) if each.grad is None else each.grad
                dist.all_reduce(each.grad)
                each.grad /= dist.get_world_size()


def compute_on_a_shared_core() -> None:
    cores = os.sched_getaffinity(0)
    others = [subprocess.Popen([sys.executable, "-S", "-c", SPINNING]) for _ in range(BUSY)]
    for pid in (*(each.pid for each in others), 0):
        os.sched_setaffinity(pid, {min(cores)})
    end = time.thread_time() + CPU_S
    while time.thread_time() < end:
        pass
    os.sched_setaffinity(0, cores)
    for each in others:
        each.kill()
        each.wait()
