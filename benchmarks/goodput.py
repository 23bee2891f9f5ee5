"""Goodput, predicted and measured: a training whose ranks are killed at random times, restarted by Muster each time.

    measured     the share of useful steps that `muster why --json` shows for the run
    predicted    collectives_bench/cost/goodput.py, from the step, the stall and the save of a short run without faults,
                 and the phases of a restart that docs/failures.md shows

A step sleeps most of its time, so four ranks on the cores of one machine have a steady pace. Kills are exponential,
with a mean of MTBF_S over all ranks; an attempt that has not yet trained is killed like any other.

    .venv/bin/python benchmarks/goodput.py [--runs 4] [--minutes 10] [--json FILE]

Reach: within 5 points in each run. About 45 minutes; the machine is nearly idle.
"""

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from faults.live import Live, WaitedInVainError, start
from harness import Options, finish, table

from muster.collectives_bench.cost.goodput import Faults, Goodput, RunTimes, simulate

RANKS, PASS_S, MTBF_S, SAVE_S, CALM_S = 4, 0.2, 40.0, 10.0, 45.0
REACH = 0.05
RESTART = {"detect_s": 0.0, "stop_s": 0.15, "start_s": 0.36, "load_s": 0.03}  # docs/failures.md
MODEL = f"""
import time

from torch import nn


class Paced(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(3072, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, images):
        until = time.monotonic() + {PASS_S} * self.training
        outputs = self.layers(images)
        time.sleep(max(0.0, until - time.monotonic()))
        return outputs
"""


def begin(folder: Path) -> Live:
    """Start the training, with saves every SAVE_S seconds."""
    (folder / "net.py").write_text(MODEL)
    job = {
        "name": "goodput",
        "nodes": 1,
        "ranks_per_node": RANKS,
        "workdir": str(folder),
        "train": {
            "model": {"make": "net.py:Paced"},
            "data": "digits",
            "batch_size": 16,
            "mode": "bucketed",
            "steps": 10**6,
            "log_every": 5,
            "evaluate": False,
        },
        "checkpoint": {"every_s": SAVE_S},
        "restart": {"max": 1000, "backoff": 0.0},
    }
    return start(folder, json.dumps(job))


def stop(live: Live) -> dict[str, Any]:
    """Stop a run; return its history."""
    argv = [sys.executable, "-m", "muster"]
    subprocess.run([*argv, "stop", str(live.run.path)], capture_output=True, timeout=60, check=False)
    with suppress(WaitedInVainError):
        live.end(30.0)
    done = subprocess.run([*argv, "why", str(live.run.path), "--json"], capture_output=True, text=True, check=True)
    history: dict[str, Any] = json.loads(done.stdout)["history"]
    live.kill()
    return history


def calm() -> RunTimes:
    """Return the times of a run without faults."""
    with tempfile.TemporaryDirectory(prefix="goodput-") as folder:
        live = begin(Path(folder))
        live.wait_event("first_step")
        time.sleep(CALM_S)
        saved = live.events("saved")
        rows = [json.loads(line) for line in live.run.metrics.read_text().splitlines()]
        stop(live)
    steps = (rows[-1]["time"] - rows[4]["time"]) / (rows[-1]["step"] - rows[4]["step"])
    stall_s, save_s = (statistics.median(row[key] for row in saved) for key in ("stall_s", "seconds"))
    return RunTimes(step_s=steps, stall_s=stall_s, save_s=save_s, **RESTART)


def faulty(seconds: float, seed: int) -> dict[str, Any]:
    """Kill ranks at random times; return the history of the run and the number of kills."""
    draw, kills = random.Random(seed), 0
    with tempfile.TemporaryDirectory(prefix="goodput-") as folder:
        live = begin(Path(folder))
        live.wait_event("first_step")
        until = time.monotonic() + seconds
        while (now := time.monotonic()) < until:
            time.sleep(min(draw.expovariate(1 / MTBF_S), until - now))
            if time.monotonic() < until:
                pid = draw.choice(list(live.ranks().values()))
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    kills += 1
        return {**stop(live), "kills": kills}


def row_of(history: dict[str, Any], told: Goodput, seed: int) -> dict[str, Any]:
    """Compare a run with the prediction."""
    measured, predicted = history["shares"]["useful"], told.shares["useful"]
    return {
        "seed": seed,
        "kills": history["kills"],
        "measured": measured,
        "predicted": predicted,
        "low": told.at(0.05),
        "high": told.at(0.95),
        "shares": history["shares"],
        "reached": abs(measured - predicted) <= REACH,
    }


def main() -> int:
    """Measure, simulate, compare."""
    parser = Options(__doc__, quick={"runs": 1, "minutes": 3.0})
    parser.add_argument("--runs", type=int, default=4)
    parser.add_argument("--minutes", type=float, default=10.0, help="of each run")
    args = parser.parse_args()
    times, seconds = calm(), 60 * args.minutes
    faults = Faults(RANKS, RANKS * MTBF_S, spares=10**6)
    told = simulate(times, faults, SAVE_S, horizon_s=seconds)
    print(f"step {times.step_s:.3f} s, stall {times.stall_s:.4f} s, save {times.save_s:.2f} s", flush=True)
    rows = [row_of(faulty(seconds, seed), told, seed) for seed in range(args.runs)]
    cells = [
        [
            *(str(row[key]) for key in ("seed", "kills")),
            *(f"{100 * row[key]:.1f}%" for key in ("measured", "predicted")),
            f"{100 * row['low']:.1f}% .. {100 * row['high']:.1f}%",
        ]
        for row in rows
    ]
    table(["seed", "kills", "measured", "predicted", "5 to 95 % of simulated runs"], cells)
    return finish(args, "goodput", rows, times=vars(times), predicted=told.shares)


if __name__ == "__main__":
    sys.exit(main())
