"""The clock for NCCL. It times calls with GPU events, after a busy-wait that hides Python's overhead.

    stream   | busy-wait ~2 ms | tiny all_reduce | event | call ... | event |
    Python   enqueues all of it while the GPU waits

The tiny all_reduce makes all ranks' calls start together, because it ends only when the last rank has arrived. The
method is that of stas00's all_reduce_bench (ml-engineering).
"""

import time
from functools import partial
from statistics import median
from typing import Final

import torch
import torch.distributed as dist

from muster.collectives_bench.ranks.sampling import ControlGroup, Run

BUSY_MS: Final = 2.0
PROBE_CYCLES: Final = 1_000_000
US_PER_MS: Final = 1e3
US: Final = 1e6


class StreamClock:
    """A clock for calls on the current stream of a device."""

    pause_s = 0.0025

    def __init__(self, control_group: ControlGroup, group: dist.ProcessGroup, device: torch.device) -> None:
        self.control_group = control_group
        self.group = group
        self.device = device
        self.token = torch.zeros(1, device=device)
        self.cycles = 0
        self._align()  # because NCCL connects in the first call
        torch.cuda.synchronize(device)
        self.cycles = self._cycles_of_busy_wait()

    def loop(self, run: Run, calls: int) -> float:
        """Time calls that are queued back to back; return the microseconds per call."""
        begin, end = self._events()
        torch.cuda.synchronize(self.device)
        self.control_group.barrier()
        self._align()
        begin.record()
        for _ in range(calls):
            run()
        end.record()
        self.control_group.beat()  # this rank reports that it waits, so it is not the rank for which others wait
        end.synchronize()
        elapsed_ms: float = begin.elapsed_time(end)
        return elapsed_ms * US_PER_MS / calls

    def host(self, run: Run, calls: int) -> float | None:
        """Return the median time until a call returns to Python, in microseconds. The GPU is idle before each call."""
        took = []
        for _ in range(calls):
            torch.cuda.synchronize(self.device)
            self.control_group.beat()
            started = time.perf_counter()
            run()
            took.append((time.perf_counter() - started) * US)
        torch.cuda.synchronize(self.device)
        return median(took)

    def _align(self) -> None:
        if self.cycles:
            torch.cuda._sleep(self.cycles)  # type: ignore[no-untyped-call]
        dist.all_reduce(self.token, group=self.group)

    def _cycles_of_busy_wait(self) -> int:
        begin, end = self._events()
        torch.cuda._sleep(PROBE_CYCLES)  # type: ignore[no-untyped-call] # the first one loads the kernel
        begin.record()
        torch.cuda._sleep(PROBE_CYCLES)  # type: ignore[no-untyped-call]
        end.record()
        end.synchronize()
        return int(PROBE_CYCLES * BUSY_MS / begin.elapsed_time(end))

    def _events(self) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        make = partial(torch.cuda.Event, enable_timing=True)
        return make(), make()
