"""Benchmarks on the ranks of `on_ranks`, without an agent; and what can happen to a launch worker."""

import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from muster.collectives_bench.ranks import launch_manager, operations
from muster.collectives_bench.ranks.run import BenchTask, conduct
from muster.collectives_bench.settings import BenchSettings
from muster.jobs.basics.files import read_lines
from muster.jobs.hosts.ranks import RankEnv
from muster.jobs.world.world import World
from support.programs import Program, Programs

REPOSITORY = Path(__file__).parents[2]


@dataclass(frozen=True)
class Fault:
    """What a rank does in its calls of an operation; rank -1: every rank."""

    how: str
    operation: str
    rank: int


def _mismatch() -> None:
    dist.broadcast(torch.ones(3 << 18), 0)  # more than the others'


def _slow(run: Callable[[], None]) -> None:
    run()
    time.sleep(1.1)


def _loop() -> None:
    while True:
        time.monotonic()


def _raise() -> None:
    raise ValueError("a mistake of the rank's own")


FAULTS: dict[str, Callable[[], Any]] = {
    "raise": _raise,
    "abort": os.abort,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "exit": lambda: os._exit(3),
    "loop": _loop,
    "mismatch": _mismatch,
    "kill launch manager": lambda: os.kill(os.getppid(), signal.SIGKILL),
}


def inject(fault: Fault, rank: int) -> None:
    """Break an operation on this rank, or its start; its workers are forks of this process."""
    if fault.operation == "start" and rank == fault.rank:
        dist.new_group = lambda **_: FAULTS[fault.how]()
    if fault.how == "mute launch manager":
        launch_manager.ENDINGS_S = 2.0  # in which a rank that is only slow is heard
        if rank == fault.rank:
            launch_manager.LaunchManager._tell_ending = lambda *_: None
        return
    prepare = operations.prepare

    def prepared(cell: Any, *more: Any, **named: Any) -> Any:
        call = prepare(cell, *more, **named)
        if cell.operation == fault.operation and fault.rank in (rank, -1):
            call.run = partial(_slow, call.run) if fault.how == "slow" else FAULTS[fault.how]
        return call

    operations.prepare = prepared


def measure(world: World, settings: dict[str, Any], out: str, port: int, fault: dict[str, Any] | None = None) -> int:
    """Be one rank of a benchmark of the test's; return its exit code."""
    env = RankEnv(world.rank, world.size, world.rank, world.size, 0, 1, "127.0.0.1", port)
    if fault is not None:
        inject(Fault(**fault), world.rank)
    return conduct(BenchTask(BenchSettings(**settings), env, Path(out), "test", 30.0))


def by_hand(programs: Programs, *argv: str, folder: Path | None = None, **variables: str) -> Program:
    """Start a module as a user would; nothing is set that its starter did not set."""
    clean = {name: value for name, value in os.environ.items() if name != "RANK" and not name.startswith("MUSTER")}
    return programs.start("-m", *argv, env={**clean, "PYTHONPATH": str(REPOSITORY), **variables}, cwd=folder)


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
    return port


def blocks(out: Path) -> list[dict[str, Any]]:
    """Return the blocks of a file whose first line is the header and whose last is the end."""
    rows = list(read_lines(out))
    assert [rows[0]["record"], rows[-1]["record"]] == ["header", "end"], rows
    return rows[1:-1]
