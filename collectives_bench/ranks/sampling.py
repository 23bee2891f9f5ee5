"""The timing of one cell: warm up, take single samples until they are precise enough, then run a loop without pauses.

Every rank times its own calls. The time of a call is its time on the slowest rank. Ranks exchange their times over a
separate gloo group, batch by batch, so that all ranks have the same numbers and stop at the same call. The method
follows Hoefler & Belli, "Scientific Benchmarking of Parallel Computing Systems" (SC'15), and ReproMPI (Hunold &
Carpen-Amarie).
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist
from torch.distributed import BarrierOptions

from muster.collectives_bench.settings import BenchSettings
from muster.jobs.measuring import stats

Run = Callable[[], None]

WARM_UP_S: Final = 0.5
AGREE: Final = 0.2  # warm-up ends when the times of two successive calls differ by less than this share
LEAST_WARM_UP: Final = 2
BATCH_S: Final = 0.025
MOST_IN_BATCH: Final = 50
LATENCY_SHARE: Final = 0.7  # share of block_s for warm-up and samples; the rest is for the loop
LEAST_BACK_TO_BACK: Final = 2
MOST_BACK_TO_BACK: Final = 500
US: Final = 1e6


class TooSlowError(Exception):
    """A call took longer than `timeout_s`. Every rank raises this at the same call, so that all continue together."""


class Clock(Protocol):
    """A clock for calls on one rank, in microseconds. `nccl.py` has the clock for CUDA streams.

    `pause_s` is roughly the time between two samples.
    """

    pause_s: float

    def loop(self, run: Run, calls: int) -> float:
        """Time back-to-back calls after a barrier; return the time of one call."""

    def host(self, run: Run, calls: int) -> float | None:
        """Return the time until a call returns to Python; None if a call returns only when it has finished."""


class ControlGroup:
    """A gloo group over which ranks exchange numbers. This group is never measured."""

    def __init__(self, group: dist.ProcessGroup, beat: Callable[[], None]) -> None:
        self.group = group
        self.size = group.size()
        self.beat = beat
        # dist.barrier would use the device that NCCL's group is bound to, even on this group.
        self._on_cpu = BarrierOptions()
        self._on_cpu.device = torch.device("cpu")

    def barrier(self) -> None:
        """Wait until all ranks have called this."""
        self.beat()
        self.group.barrier(opts=self._on_cpu).wait()
        self.beat()

    def gather(self, mine: Sequence[float]) -> list[list[float]]:
        """Return the numbers of every rank, in rank order. All ranks must pass the same number of values."""
        self.beat()
        own = torch.tensor(mine, dtype=torch.float64)  # (numbers,)
        everybody = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(everybody, own, group=self.group)
        rows: list[list[float]] = [each.tolist() for each in everybody]
        return rows

    def largest(self, mine: float) -> float:
        """Return the maximum over all ranks."""
        return max(each[0] for each in self.gather([mine]))

    def told(self, mine: Any) -> list[Any]:
        """Return the JSON values of all ranks, in rank order. Do not call this while times are measured.

        torch's gather of objects is not used, because it unpickles data from the network.
        """
        text = json.dumps(mine).encode()
        longest = int(self.largest(len(text)))
        own = torch.frombuffer(bytearray(text.ljust(longest)), dtype=torch.uint8)  # shape (bytes,), padded with spaces
        everybody = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(everybody, own, group=self.group)
        return [json.loads(bytes(each.tolist())) for each in everybody]


class HostClock:
    """The clock for gloo. On a CPU, a call is over when it returns; on a GPU, when the device is idle."""

    pause_s = 0.0002

    def __init__(self, control_group: ControlGroup, device: torch.device) -> None:
        self.control_group = control_group
        self.device = device

    def loop(self, run: Run, calls: int) -> float:
        """Time back-to-back calls after a barrier; return the microseconds per call."""
        self._settle()
        self.control_group.barrier()
        started = time.perf_counter()
        for _ in range(calls):
            run()
            self.control_group.beat()
        self._settle()
        return (time.perf_counter() - started) * US / calls

    def host(self, run: Run, calls: int) -> float | None:
        """Return None, because calls return only when they are done."""
        return None

    def _settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@dataclass(frozen=True)
class Samples:
    """The times of a block's calls, in microseconds. `by_rank` has each rank's own times of the same calls."""

    slowest: list[float]
    by_rank: list[list[float]]

    @property
    def lateness(self) -> list[float]:
        """For each rank, the median over calls of its time as a share of the slowest rank's time."""
        return [
            round(
                median(
                    mine / slowest if slowest > 0 else 1.0 for mine, slowest in zip(each, self.slowest, strict=True)
                ),
                4,
            )
            for each in self.by_rank
        ]


class CallSampler:
    """A sampler that times the calls of one cell after another.

    `parts` is the number of one-way transfers in a call.
    """

    def __init__(self, clock: Clock, control_group: ControlGroup, settings: BenchSettings) -> None:
        self.clock = clock
        self.control_group = control_group
        self.settings = settings
        self._began = time.perf_counter()

    def first(self, run: Run) -> float:
        """Make the first call, and start the block's time budget; return the time of the call on the slowest rank."""
        self._began = time.perf_counter()
        return self._one(run)

    def warm_up(self, run: Run, first_us: float) -> int:
        """Call until two successive calls take about the same time; return the number of calls, including the first."""
        before, spent_us, calls = first_us, first_us, 1
        while True:
            now = self._one(run)
            calls, spent_us = calls + 1, spent_us + now
            agree = abs(now - before) <= AGREE * min(now, before)
            if calls >= LEAST_WARM_UP and (agree or spent_us >= WARM_UP_S * US):
                return calls
            before = now

    def latency(self, run: Run) -> Samples:
        """Take at least `least_samples` samples, until their interval is narrow enough or the time is over.

        Raises:
            TooSlowError: if a call took longer than `timeout_s`. `first` and `warm_up` also raise this error.
        """
        settings = self.settings
        by_rank: list[list[float]] = [[] for _ in range(self.control_group.size)]
        slowest: list[float] = []
        count = settings.least_samples
        while count > 0:
            mine = [self.clock.loop(run, 1) for _ in range(count)]
            gathered = self.control_group.gather([*mine, time.perf_counter() - self._began])
            spent_s = max(each.pop() for each in gathered)  # all ranks must make the same decision
            for known, new in zip(by_rank, gathered, strict=True):
                known += new
            slowest += [self._in_time(max(each)) for each in zip(*gathered, strict=True)]
            left_s = LATENCY_SHARE * settings.block_s - spent_s
            if left_s <= 0 or stats.is_precise(slowest, settings.precision):
                break
            each_s = median(slowest) / US + self.clock.pause_s
            count = max(1, min(MOST_IN_BATCH, int(min(BATCH_S, left_s) / each_s)))
            count = min(count, settings.most_samples - len(slowest))
        return Samples(slowest, by_rank)

    def back_to_back(self, run: Run, each_us: float) -> float:
        """Return the time of a call in a loop without pauses, in microseconds."""
        budget_us = (1 - LATENCY_SHARE) * self.settings.block_s * US
        calls = max(LEAST_BACK_TO_BACK, min(MOST_BACK_TO_BACK, int(budget_us / max(each_us, 1.0))))
        return self.control_group.largest(self.clock.loop(run, calls))

    def host(self, run: Run) -> float | None:
        """Return the microseconds until a call returns to Python on the slowest rank; None if that is not measured."""
        mine = self.clock.host(run, MOST_IN_BATCH)
        return None if mine is None else self.control_group.largest(mine)

    def _one(self, run: Run) -> float:
        return self._in_time(self.control_group.largest(self.clock.loop(run, 1)))

    def _in_time(self, slowest_us: float) -> float:
        if slowest_us > self.settings.timeout_s * US:
            took, limit = f"{slowest_us / US:.3g} s", f"{self.settings.timeout_s:g} s"
            raise TooSlowError(f"a call took {took} on the slowest rank, longer than {limit} (timeout_s)")
        return slowest_us
