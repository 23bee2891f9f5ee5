"""The entry point of a rank of a `bench:` job. The rank runs hello or the launch manager (`launch_manager.py`)."""

import os
import socket
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from muster.collectives_bench.plan import cells_of
from muster.collectives_bench.ranks.bench_ranks import assemble
from muster.collectives_bench.ranks.launch_manager import LaunchManager
from muster.collectives_bench.ranks.result_writer import ResultWriter
from muster.collectives_bench.records import BenchCell
from muster.collectives_bench.results.files import read_result
from muster.collectives_bench.results.report import report_lines
from muster.collectives_bench.settings import BenchSettings
from muster.jobs.basics.words import counted
from muster.jobs.hosts import ranks
from muster.jobs.hosts.ranks import RankEnv
from muster.jobs.node.reports import Reporter
from muster.jobs.runfolder.rundir import RunDir
from muster.jobs.spec.job import Job
from muster.jobs.world.guard import FAILED, complain, guarded, make_own_folder, measured, show_stacks

FAREWELL_S: Final = 10.0
PAIRS: Final = BenchCell(operation="pairs", dtype="fp32", asked_bytes=0, place="out")  # all pairs are one cell


@dataclass(frozen=True)
class BenchTask:
    """The task of a rank: the settings, its environment, and the file for records."""

    settings: BenchSettings
    env: RankEnv
    path: Path
    name: str
    start_timeout_s: float


def run_rank(payload: dict[str, Any]) -> int:
    """Run one rank of a `bench:` job in a fork of the warm process; return the exit code."""
    show_stacks()
    settings = BenchSettings.model_validate(payload["job"]["settings"])
    job = Job.model_validate({**payload["job"], "settings": settings})  # keys that are not set get their defaults
    if settings.is_hello:
        return run_operation(settings, job.start_timeout_s)
    env = ranks.read(os.environ)
    path = RunDir(Path(env.run_dir)).attempt(env.attempt).bench
    return conduct(BenchTask(settings, env, path, job.name, job.start_timeout_s))


def run_operation(settings: BenchSettings, start_timeout_s: float) -> int:
    """Meet the other ranks, run hello, and return 0 if its sum is correct."""
    assert settings.is_hello

    def work(reporter: Reporter) -> int:
        env = ranks.read(os.environ)
        reporter.arrived()
        dist.init_process_group("gloo", timeout=timedelta(seconds=start_timeout_s))
        reporter.joined()
        return 0 if hello(env) else FAILED

    return guarded(work)


def conduct(task: BenchTask) -> int:
    """Meet the other ranks and measure everything; return 0 if no measurement failed or was wrong."""

    def work(reporter: Reporter) -> int:
        settings, env = task.settings, task.env
        bench_ranks = assemble(env, settings, task.start_timeout_s, reporter.arrived)
        reporter.joined()
        cells = [PAIRS] if settings.pairs else cells_of(settings, env.world_size)
        writer = None
        if env.rank == 0:
            make_own_folder(task.path.parent)
            writer = ResultWriter(task.path, bench_ranks, settings, name=task.name, say=complain)
        LaunchManager(bench_ranks, settings, cells, writer).run()
        bench_ranks.part(FAREWELL_S)
        if writer is None:
            return 0
        print("\n".join(report_lines(read_result([task.path]))), flush=True)
        total = counted(sum(writer.states.values()), "record")
        return measured(reporter, f"{writer.bad} of {total} failed or were wrong" if writer.bad else "", task.path)

    return guarded(work)


def hello(env: RankEnv) -> bool:
    """Print where this rank runs, add up all rank numbers over the network, and return whether the sum is n(n-1)/2."""
    total = torch.tensor([float(env.rank)])
    started = time.perf_counter()
    dist.all_reduce(total)
    milliseconds = (time.perf_counter() - started) * 1e3
    expected = env.world_size * (env.world_size - 1) / 2
    place = f"rank {env.rank} of {env.world_size} on node {env.node_rank} ({socket.gethostname()}, pid {os.getpid()})"
    print(f"{place}: the ranks sum to {total.item():g}, in {milliseconds:.2f} ms")
    if total.item() != expected:
        print(f"rank {env.rank}: the sum should be {expected:g}", file=sys.stderr)
        return False
    return True
