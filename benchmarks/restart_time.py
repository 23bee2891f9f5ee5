"""kill -9 of one of four CPU ranks: to the first new step, beside `torchrun --max-restarts` with the same model.

    .venv/bin/python benchmarks/restart_time.py [--repeats 4]

Both save every 20 steps and are hit between saves; the time ends when the first step after the restart is done. Ours
is the supervisor's event `first_step`. torchrun gets TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: without it, torch 2.13
leaves the dead attempt's addresses in the store that all attempts share, and the restarted ranks refuse to connect.
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from faults.bench import Bench
from faults.live import wait_for
from faults.work import job
from pairs import interleaved, report

REACH_S = 1.5
RANKS = 4
HIT = 2
AT_STEP = 45
EVERY = 20
JOB = job(
    nodes=1,
    ranks=RANKS,
    steps=100_000,
    every=EVERY,
    train={"mode": "ddp", "exact": False, "virtual_ranks": None},
)
PEER = Path(__file__).with_name("restart_peer.py")


def muster_once(bench: Bench) -> float:
    """Return the seconds of one restart of Muster's."""
    live = bench.start(JOB)
    try:
        live.wait_step(AT_STEP)
        pid = live.ranks()[HIT]
        began = time.time()
        os.kill(pid, signal.SIGKILL)
        return float(live.wait_event("first_step", attempt=1)["time"]) - began
    finally:
        live.kill()


def torchrun_once(bench: Bench) -> float:
    """Return the seconds of one restart of torchrun's."""
    folder = bench.place()
    argv = [str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc_per_node", str(RANKS)]
    argv += ["--max-restarts", "3", str(PEER), str(folder), "100000", str(EVERY)]
    env = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    with (folder / "said.txt").open("wb") as said:
        process = subprocess.Popen(argv, stdout=said, stderr=said, env=env, start_new_session=True)
    try:
        wait_for("torchrun's steps", lambda: any(step >= AT_STEP for _, step, _ in _steps(folder)))
        pid = int((folder / f"pid-{HIT}-0").read_text())
        began = time.time()
        os.kill(pid, signal.SIGKILL)
        new = wait_for("torchrun's restart", lambda: [row for row in _steps(folder) if row[0] == 1])
        return new[0][2] - began
    finally:
        process.terminate()
        process.wait(60)


def _steps(folder: Path) -> list[tuple[int, int, float]]:
    path = folder / "steps"
    rows = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    return [(int(row[0]), int(row[1]), float(row[2])) for row in rows if len(row) == 3]


def main() -> int:
    """Measure both sides, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=4)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as text:
        bench = Bench(Path(text))
        sides: list[Callable[[], float]] = [lambda: muster_once(bench), lambda: torchrun_once(bench)]
        ours, theirs = interleaved(sides[0], sides[1], args.repeats)
    median = statistics.median(ours)
    reached = median <= REACH_S
    print(f"kill to the first new step: {median:.2f} s; reach {REACH_S:g} s: {'yes' if reached else 'NO'}")
    report("restart after kill -9 of one rank of 4", ours, theirs, reach=1.0, reach_s=REACH_S, reached_s=reached)
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
