"""What a rank of a `bench:` job runs."""

import os
import socket
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from collectives_bench.settings import BenchSettings
from jobs import ranks
from jobs.ranks import RankEnv
from jobs.reports import Reporter
from jobs.spec import Job
from jobs.train.failures import is_lost_connection


def run_rank(payload: dict[str, Any]) -> int:
    """Run one rank of a `bench:` job in a fork of the warm process; return the exit code."""
    settings = BenchSettings.model_validate(payload["job"]["settings"])
    job = Job.model_validate({**payload["job"], "settings": settings})  # keys left unset have their defaults there
    return run_operation(settings, job.start_timeout_s)


def run_operation(settings: BenchSettings, start_timeout_s: float) -> int:
    """Meet the other ranks, run the operation, and return 0 if its result was right."""
    env = ranks.read(os.environ)
    reporter = Reporter(os.environ)
    reporter.arrived()
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=start_timeout_s))
        reporter.joined()
        right = hello(env)
    except Exception as error:
        reporter.failed(error, peer=is_lost_connection(error))  # a victim must not be taken for the culprit
        raise
    dist.destroy_process_group()
    return 0 if right else 1


def hello(env: RankEnv) -> bool:
    """Print where this rank is, sum all ranks over the network, and say whether the sum is n(n-1)/2."""
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
