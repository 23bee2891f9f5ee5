"""The launch worker: one rank of one launch. It creates new process groups, and measures cells in a given order.

    group     the process group that is measured
    control   a second group (gloo), for barriers and the exchange of times

The worker sends these messages to its launch manager. Only rank 0's messages contain results.

{"ready": init_s}, {"enter": cell}, {"block": Block, "of": cell}; for pairs {"meet": two nodes or null} and, after each
round, {"pairs": [Pair, with all its samples so far]}.
"""

import gc
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from statistics import median
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import _set_pg_timeout

from muster.collectives_bench.catalog import OPERATIONS, actual_bytes
from muster.collectives_bench.ranks import facts, memory, operations, wire
from muster.collectives_bench.ranks.bench_ranks import BenchRanks
from muster.collectives_bench.ranks.calls import Call
from muster.collectives_bench.ranks.load import LoadHistory
from muster.collectives_bench.ranks.nccl import StreamClock
from muster.collectives_bench.ranks.pairs import PairTests
from muster.collectives_bench.ranks.sampling import CallSampler, Clock, ControlGroup, HostClock, TooSlowError
from muster.collectives_bench.records import BenchCell, BenchMemory, Block, SampleTimes, WireBytes
from muster.collectives_bench.settings import BenchSettings
from muster.jobs.machine import load
from muster.jobs.node.page import Page
from muster.jobs.world.forked import Tell

LEAST_INIT_S: Final = 30.0  # when c10d creates a group, name lookups may take more than 5 s
PATIENCE_S: Final = 0.5  # added to the time-out of ranks that wait, so that the slow call itself fails first
FAREWELL_S: Final = 10.0
DIGITS: Final = 2  # decimal places of times in microseconds


@dataclass(frozen=True)
class LaunchOrder:
    """The work for one try of a launch. `number` counts all tries of the job."""

    number: int
    launch: int
    cells: Sequence[int]
    without: Sequence[Sequence[int]] = ()  # pairs of nodes that have failed in this launch


class LaunchRank:
    """One rank of a launch, with its process groups."""

    def __init__(self, bench_ranks: BenchRanks, settings: BenchSettings, order: LaunchOrder, page: Page) -> None:
        self.bench_ranks = bench_ranks
        self.settings = settings
        self.order = order
        self.rank, self.size, self.device = bench_ranks.env.rank, bench_ranks.env.world_size, bench_ranks.device
        self.store = self._own_store()
        started = time.perf_counter()
        self.group, control = self._groups()
        self.control_group = ControlGroup(control, page.beat)
        self.init_s = self.control_group.largest(time.perf_counter() - started)
        backend = bench_ranks.world.backend
        clock: Clock = HostClock(self.control_group, self.device)
        if backend == "nccl":
            clock = StreamClock(self.control_group, self.group, self.device)
        self.sampler = CallSampler(clock, self.control_group, settings)
        self.history = LoadHistory(
            [rank_host.machine for rank_host in bench_ranks.rank_hosts],
            [rank_host.host for rank_host in bench_ranks.rank_hosts],
        )
        self.counter: wire.WireCounter | None = None
        if settings.wire and bench_ranks.counts_the_wire(self.rank):
            interface = facts.interface_of(bench_ranks.env, os.environ)
            alone = len({rank_host.network for rank_host in bench_ranks.rank_hosts}) == 1
            self.counter = wire.WireCounter(wire.interfaces_of(interface, alone=alone))

    def _own_store(self) -> PrefixStore:
        """Open a new connection to the store, because the existing one belongs to the launch manager."""
        env, timeout = self.bench_ranks.env, timedelta(seconds=max(LEAST_INIT_S, self.settings.timeout_s))
        dialled = TCPStore(
            env.master_addr, env.master_port, env.world_size, is_master=False, timeout=timeout, wait_for_workers=False
        )
        return PrefixStore(f"{self.bench_ranks.prefix}/try-{self.order.number}", dialled)

    def _groups(self) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        init = timedelta(seconds=max(LEAST_INIT_S, self.settings.timeout_s))
        backend = self.bench_ranks.world.backend
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        dist.init_process_group(
            backend,
            store=self.store,
            rank=self.rank,
            world_size=self.size,
            timeout=init,
            device_id=self.device if backend == "nccl" else None,
        )
        group = dist.group.WORLD
        control = dist.new_group(backend="gloo", timeout=init)
        assert group is not None
        assert control is not None
        _set_pg_timeout(timedelta(seconds=self.settings.timeout_s), group)
        _set_pg_timeout(timedelta(seconds=self.settings.timeout_s + PATIENCE_S), control)
        return group, control

    # Blocks ---------------------------------------------------------------------------------------------------------

    def read_load(self) -> Any:
        """Exchange the loads of hosts. Return the recent load, or None at the first reading."""
        told = self.control_group.gather(load.read())
        return self.history.add(time.perf_counter(), [load.Reading(*each) for each in told])

    def play(self, cell: BenchCell) -> Block:
        """Measure one cell; return its block. All ranks call this together; only rank 0's block is reported."""
        nbytes = actual_bytes(OPERATIONS[cell.operation], cell.asked_bytes, self.size, cell.dtype)
        if reason := operations.unsupported(cell, self.bench_ranks.world.backend, self.device):
            return self.block(cell, nbytes, state="unsupported", reason=reason)
        if reason := self._refusal(cell, nbytes):
            return self.block(cell, nbytes, state="refused", reason=reason)
        call = operations.prepare(cell, nbytes, self.group, self.device)
        try:
            return self._measure(cell, nbytes, call)
        except TooSlowError as error:
            return self.block(cell, nbytes, state="timeout", reason=str(error))

    def _refusal(self, cell: BenchCell, nbytes: int) -> str | None:
        share, here = self.settings.memory_share, len(self.bench_ranks.companions(self.rank))
        self.control_group.barrier()  # wait until all ranks have freed the last cell's buffers
        reason = memory.refusal(cell, nbytes, ranks=(self.size, here), memory_share=share)
        if reason is None and self.device.type == "cuda":
            reason = memory.gpu_refusal(cell, nbytes, ranks=self.size, memory_share=share)
        return next((each for each in self.control_group.told(reason) if each), None)  # the same on all ranks

    def _measure(self, cell: BenchCell, nbytes: int, call: Call) -> Block:
        sampler, parts = self.sampler, call.parts
        call.fill()
        first_us = sampler.first(call.run)
        wrong = self._wrong(call)
        warm_up_calls = sampler.warm_up(call.run, first_us)
        samples = sampler.latency(call.run)
        samples_us = [round(each / parts, DIGITS) for each in samples.slowest]
        before, began = load.read(), time.perf_counter()
        back_to_back_us = sampler.back_to_back(call.run, median(samples.slowest))
        cores = self._cores(before, time.perf_counter() - began)
        host_us = sampler.host(call.run)
        counted = self._count_the_wire(cell, nbytes, call)
        call.fill()
        hidden = self._last_call(call, nbytes)
        wrong += self._wrong(call)
        wrong_of_all = round(sum(each[0] for each in self.control_group.gather([wrong])))
        return self.block(
            cell,
            nbytes,
            state="wrong" if wrong_of_all else "ok",
            reason=f"{wrong_of_all} wrong elements" if wrong_of_all else "",
            first_us=round(first_us / parts, DIGITS),
            warm_up_calls=warm_up_calls,
            latency=SampleTimes.of(samples_us),
            throughput_us=round(back_to_back_us / parts, DIGITS),
            cores=cores,
            host_us=host_us,
            wrong=wrong_of_all if self.settings.check else None,
            lateness=samples.lateness,
            samples_us=samples_us,
            wire=counted,
            memory=BenchMemory(
                buffers_bytes=round(self.control_group.largest(call.buffers_bytes)),
                hidden_bytes=hidden,
                of="cuda" if self.device.type == "cuda" else "rss",
            ),
        )

    def _cores(self, before: load.Reading, seconds: float) -> float:
        """Return the number of cores that all ranks, and interrupts on all machines, used since `before`."""
        now = load.read()
        used = [now.own_s - before.own_s, now.interrupts_s - before.interrupts_s]
        ranks, interrupts = zip(*self.control_group.gather([each / seconds for each in used]), strict=True)
        cores: float = sum(ranks) + sum(dict(zip(self.history.machines, interrupts, strict=True)).values())
        return round(cores, DIGITS + 1)

    def _last_call(self, call: Call, nbytes: int) -> int | None:
        """Make the call whose result is checked. In the first launch, also measure the memory of the call."""
        if self.order.launch != 0:
            call.run()
            return None
        hidden = memory.hidden_bytes(call.run, nbytes, self.device)
        largest = round(self.control_group.largest(-1 if hidden is None else hidden))
        return largest if largest >= 0 else None

    def _count_the_wire(self, cell: BenchCell, nbytes: int, call: Call) -> WireBytes | None:
        """Count the bytes that interfaces send, in the first launch and only with gloo; else return None."""
        if not self.settings.wire or self.order.launch != 0 or self.bench_ranks.world.backend != "gloo":
            return None

        def run() -> None:
            self.control_group.beat()
            call.run()

        return wire.audit(run, cell, nbytes, counter=self.counter, control=self.control_group.group)

    def _wrong(self, call: Call) -> int:
        self.control_group.beat()
        return call.wrong() if self.settings.check else 0

    def block(self, cell: BenchCell, nbytes: int, **found: Any) -> Block:
        """Build the block of a cell in this launch."""
        return Block(
            launch=self.order.launch,
            world=self.bench_ranks.world,
            cell=cell,
            nbytes=nbytes,
            time=time.time(),
            load=self.read_load(),
            **found,
        )

    def leave(self) -> None:
        """End together.

        Otherwise a rank that ended before others had read its last message would seem to have failed.
        """
        if self.store.add("left", 1) == self.size:
            self.store.set("all-left", "")
        self.store.wait(["all-left"], timedelta(seconds=FAREWELL_S + self.settings.timeout_s))


def play(
    bench_ranks: BenchRanks,
    settings: BenchSettings,
    cells: Sequence[BenchCell],
    order: LaunchOrder,
    tell: Tell,
    page: Page,
) -> None:
    """Run a launch, or the rest of it, as one rank."""
    stage = LaunchRank(bench_ranks, settings, order, page)
    tell({"ready": stage.init_s})
    stage.read_load()
    if settings.pairs:
        play_all_pairs(stage, tell)
    else:
        play_cells(stage, cells, tell, page)
    stage.leave()


def play_cells(stage: LaunchRank, cells: Sequence[BenchCell], tell: Tell, page: Page) -> None:
    """Measure one cell after another. Rank 0 reports each block when it ends."""
    gc.freeze()  # so that objects from before the fork are never collected
    gc.disable()  # so that no garbage collection runs while a call is timed
    for index in stage.order.cells:
        page.beat()
        tell({"enter": index})
        block = stage.play(cells[index])
        if stage.rank == 0:
            tell({"block": block.model_dump(mode="json"), "of": index})
        gc.collect()
        if stage.device.type == "cuda":
            torch.cuda.empty_cache()


def play_all_pairs(stage: LaunchRank, tell: Tell) -> None:
    """Measure every pair of nodes; all pairs count as one cell. Rank 0 reports results after each round."""
    (index,) = stage.order.cells
    tell({"enter": index})
    pair_tests = PairTests(stage.bench_ranks, stage.settings, stage.group, stage.control_group)
    for found in pair_tests.play(
        stage.order.launch, without=stage.order.without, meets=lambda pair: tell({"meet": pair})
    ):
        if stage.rank == 0:
            tell({"pairs": [pair.model_dump(mode="json") for pair in found]})
    if stage.rank == 0:
        tell({"of": index})
