"""Checkpoints in the memory of other nodes, in a box of four nodes at 1 Gbit/s: a GPT of 57 M parameters in zero3.

    cost   what copies of the state every EVERY steps add to a step. In one run, the steps in which a copy is made are
           compared with the quiet steps before and after them, so a slow drift of the machine does not count; the
           result is the median over all copies but the first, which is sent at full speed. A run ends after --steps
           or --seconds. With --repeats N, also N pairs of runs with and without copies, in turns. Saves on disk are
           EVERY_DISK steps apart, so no run makes one
    loss   steps lost after node 2 lost its power after step KILL, with the disk checkpoint every 200 steps

    sudo .venv/bin/python benchmarks/peer_memory.py cost|loss [--box NAME] [--steps 80] [--repeats 0] [--mode zero3]

Reach: cost <= 1.03; loss <= 10 steps.
"""

import json
import math
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from faults.bench import in_box
from faults.live import Live, start, wait_for
from harness import Options, finish, ratio_of, spread, turns

from muster.cloudlab.box.control import Box
from muster.jobs.basics.files import read_lines

NODES, EVERY, EVERY_DISK, KILL = 4, 10, 200, 25
REACH, REACH_STEPS = 1.03, 10
LEAST_QUIET = 2  # steps before and after a copy
LIMIT_S = 900
SMALL = {"d_model": 64, "d_ff": 256, "layers": 2, "heads": 2, "context": 64}
LARGE = {"d_model": 768, "d_ff": 3072, "layers": 8, "heads": 12, "context": 64}  # 57 M parameters


def job(mode: str, steps: int, *, copies: bool, model: dict[str, Any], batch_size: int) -> str:
    """Return a job: JSON is YAML."""
    train = {
        "model": model,
        "data": "synthetic",
        "mode": mode,
        "batch_size": batch_size,
        "steps": steps,
        "log_every": 1,
        "evaluate": False,
        "optimizer": {"name": "adamw", "lr": 1e-4},
    }
    checkpoint = {"every_steps": EVERY_DISK, **({"memory_every_steps": EVERY} if copies else {})}
    restart = {"min_nodes": NODES - 1, "backoff": 0.0}
    return json.dumps(
        {"name": "copies", "nodes": NODES, "threads_per_rank": 1, "train": train}
        | {"checkpoint": checkpoint, "restart": restart}
    )


@dataclass
class Timed:
    """The time of every step in one run, and {step: when its copy was complete}, in Unix seconds."""

    ended: dict[int, float]
    copied: dict[int, float]

    def step_s(self) -> float:
        """Return the mean seconds of a step after the first 2 * EVERY, in whole multiples of EVERY."""
        first, last = 2 * EVERY, max(self.ended) // EVERY * EVERY
        return (self.ended[last] - self.ended[first]) / (last - first)

    def added(self) -> list[float]:
        """Return what each copy but the first added to EVERY steps, over the time of these steps without it."""
        found: list[float] = []
        took = {step: at - self.ended[step - 1] for step, at in self.ended.items() if step - 1 in self.ended}
        for step, complete in self.copied.items():
            earlier = self.copied.get(step - EVERY, math.inf)
            before = [took[each] for each in took if step - EVERY < each <= step and self.ended[each - 1] >= earlier]
            after = [each for each in range(step + 1, step + EVERY + 1) if each in took]
            with_copy = [took[each] for each in after if self.ended[each - 1] < complete]
            if min(len(before), len(after) - len(with_copy)) < LEAST_QUIET:
                continue
            quiet = statistics.mean(map(statistics.median, (before, [took[each] for each in after[len(with_copy) :]])))
            found.append((sum(with_copy) - len(with_copy) * quiet) / (EVERY * quiet))
            print(f"copy of step {step}: {', '.join(f'{each:.2f}' for each in with_copy)} | {quiet:.2f} s a step, "
                  f"complete after {complete - self.ended[step]:.1f} s, adds {found[-1]:+.1%}", flush=True)  # fmt: skip
        return found


def timed(args: Any, folder: Path, *, copies: bool) -> Timed:
    """Train, and stop after the steps."""
    live = start(folder / f"{len([*folder.iterdir()])}", job(args.mode, 10_000, copies=copies, model=LARGE,
                 batch_size=args.batch), *in_box(args.box))  # fmt: skip
    try:
        until = time.monotonic() + args.seconds
        wait_for("the steps", lambda: last_step(live) >= args.steps or time.monotonic() > until, LIMIT_S)
    finally:
        stop(live)
    ended = {row["step"]: row["time"] for row in read_lines(live.run.metrics)}
    copied = {row["step"]: row["time"] for row in read_lines(live.run.events) if row["event"] == "copied"}
    found = Timed(ended, copied)
    print(f"{'with' if copies else 'without'} copies: {found.step_s():.3f} s a step; copied {[*copied]}", flush=True)
    return found


def last_step(live: Live) -> int:
    """Return the last logged step."""
    return max((row["step"] for row in read_lines(live.run.metrics)), default=0)


def stop(live: Live) -> None:
    """End a run at once, without a save."""
    argv = [sys.executable, "-m", "muster", "stop", live.run.run_id, "--runs", str(live.root), "--now"]
    subprocess.run(argv, check=False, capture_output=True)
    live.process.wait(timeout=60)


def cost(args: Any, folder: Path) -> dict[str, Any]:
    """Compare steps with and without copies: within each run with copies, and between runs in turns."""
    sides = {name: partial(timed, args, folder, copies=name == "with") for name in ("with", "without")}
    runs = turns(sides, args.repeats) if args.repeats else {"with": [sides["with"]()], "without": []}
    ratios = [1 + each for run in runs["with"] for each in run.added()]
    if not ratios:
        raise SystemExit("no copy but the first has quiet steps before and after it; give more --steps or --seconds")
    row: dict[str, Any] = {"ratio": statistics.median(ratios), "ratios": ratios}
    print(f"steps with copies / without, in the same run: {spread(row)}; reach <= {REACH}")
    if args.repeats:
        row["pairs"] = ratio_of(*([run.step_s() for run in runs[name]] for name in ("with", "without")))
        print(f"runs with copies / without: {spread(row['pairs'])}")
    return row | {"name": "cost", "mode": args.mode, "reach": REACH, "reached": row["ratio"] <= REACH}


def loss(args: Any, folder: Path) -> dict[str, Any]:
    """Cut the power of a node, and count the steps that are repeated."""
    live = start(folder / "loss", job(args.mode, 10_000, copies=True, model=SMALL, batch_size=16), *in_box(args.box))
    box = Box(args.box)
    try:
        wait_for("the steps", lambda: last_step(live) >= KILL, LIMIT_S)
        box.fail("node2", "power")
        wait_for("the next attempt", lambda: any(r["event"] == "loaded" for r in read_lines(live.run.events)), 60)
        wait_for("its first step", lambda: any(r["event"] == "first_step" and r["attempt"] == 1
                 for r in read_lines(live.run.events)), 60)  # fmt: skip
    finally:
        stop(live)
        box.heal("node2")
    first, *_ = read_lines(live.run.attempts)
    (loaded,) = [row for row in read_lines(live.run.events) if row["event"] == "loaded"][:1]
    (resuming,) = [row for row in read_lines(live.run.events) if row["event"] == "resuming"][:1]
    lost = first["last_step"] - loaded["step"]
    print(
        f"lost {lost} of {first['last_step']} steps; memory: {resuming.get('memory')}; loaded in {loaded['seconds']} s"
    )
    return {"name": "loss", "lost": lost, "reach": REACH_STEPS, "reached": lost <= REACH_STEPS, "row": first}


def main() -> int:
    """Measure one row."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the run is stopped
    parser = Options(__doc__, repeats=0)
    parser.add_argument("what", choices=("cost", "loss"))
    parser.add_argument("--box", default="memory", help="the name of a box that is up")
    parser.add_argument("--mode", default="zero3")
    parser.add_argument("--steps", type=int, default=8 * EVERY)
    parser.add_argument("--seconds", type=float, default=LIMIT_S)
    parser.add_argument("--batch", type=int, default=16)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="peer-memory-") as folder:
        row = {"cost": cost, "loss": loss}[args.what](args, Path(folder))
    return finish(args, f"peer memory, {args.what}", [row])


if __name__ == "__main__":
    sys.exit(main())
