"""Start of 8 ranks of a user's script that imports torch itself, against torchrun: seconds until every rank has met.

    .venv/bin/python benchmarks/own_start.py [--ranks 8] [--repeats 7]

The script joins a gloo group, does one all-reduce, and ends. The clock stops when the last rank's all-reduce is done.
CPU time is that of all processes of a command, from its start to the end of the last one. Goal: at most 0.95 of each.

torchrun starts each worker in a session of its own, Muster all ranks in one. Where the kernel schedules by session
(/proc/sys/kernel/sched_autogroup_enabled) and other work wants the cores, all our ranks together get the share of one
of torchrun's workers. On such a machine, --sessions starts each of our ranks by setsid(1), so that shares are equal.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from pairs import report

from muster.jobs.machine import linux

GOAL = 0.95
SCRIPT = """import os
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
met = torch.ones(())
dist.all_reduce(met)
with open(f"{os.environ['MET']}/{dist.get_rank()}", "w") as file:
    file.write(f"{time.monotonic()} {met.item()}")
dist.destroy_process_group()
"""


def start(argv: Sequence[str], ranks: int) -> tuple[float, float]:
    """Run a command; return its wall seconds until the last rank's all-reduce, and CPU seconds of all its processes.

    Raises:
        SystemExit: the command failed, or a rank did not meet all others.
    """
    with tempfile.TemporaryDirectory() as met:
        before, began = cpu_of_children(), time.monotonic()
        ended = subprocess.run(argv, env={**os.environ, "MET": met}, capture_output=True, text=True)
        reap()
        cpu = cpu_of_children() - before
        if ended.returncode:
            raise SystemExit(f"{' '.join(argv)} ended with {ended.returncode}\n{ended.stdout}{ended.stderr}")
        lines = [(Path(met) / str(rank)).read_text().split() for rank in range(ranks)]
    if any(float(total) != ranks for _, total in lines):
        raise SystemExit(f"the ranks of {' '.join(argv)} did not all meet: {lines}")
    return max(float(when) for when, _ in lines) - began, cpu


def cpu_of_children() -> float:
    """Return CPU seconds of all descendants that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def reap() -> None:
    """Wait for what a command has left behind: this process has adopted it."""
    while True:
        try:
            os.wait()
        except ChildProcessError:
            return


def main() -> int:
    """Measure both sides in turns, and report wall and CPU time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--sessions", action="store_true", help="a session for each of our ranks")
    args = parser.parse_args()
    linux.adopt_orphans()
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "meet.py"
        script.write_text(SCRIPT)
        ours = [sys.executable, "-m", "muster", "run", "-n", str(args.ranks), "-x", "MET", "--runs", folder]
        python = f"[setsid, --wait, {sys.executable}]" if args.sessions else sys.executable
        ours += ["--set", f"python={python}", str(script)]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(args.ranks), str(script)]
        times: dict[str, list[tuple[float, float]]] = {"ours": [], "torchrun": []}
        sides = {"ours": ours, "torchrun": torchrun}
        for repeat in range(args.repeats + 1):
            for side in list(sides)[:: 1 if repeat % 2 else -1]:
                found = start(sides[side], args.ranks)
                if repeat:  # the first ones fill the page cache
                    times[side].append(found)
    reached = [
        report(
            f"start of {args.ranks} ranks of a script that imports torch / torchrun, {clock}",
            *([each[place] for each in times[side]] for side in sides),
            reach=GOAL,
        )
        for place, clock in enumerate(("wall", "CPU"))
    ]
    return 0 if all(reached) else 1


if __name__ == "__main__":
    sys.exit(main())
