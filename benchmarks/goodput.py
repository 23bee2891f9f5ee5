"""Goodput, predicted and measured: a training whose ranks are killed at random times, restarted by Muster each time.

    measured     the share of useful steps that `muster why --json` shows for the run
    predicted    collectives_bench/cost/goodput.py, from a short run before: its step, stall and save, and the phases of
                 the restarts after RESTARTS kills; with the times of the run's own kills, which are random

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

from muster.collectives_bench.cost.goodput import Faults, Goodput, RunTimes, replay, simulate

RANKS, PASS_S, MTBF_S, SAVE_S, CALM_S = 4, 0.5, 40.0, 10.0, 45.0
RESTARTS, BETWEEN_S = 4, 8.0
PHASES = ("detect", "stop", "wait", "start", "load")
REACH = 0.05
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


def short_run() -> RunTimes:
    """Return the times of a run that trains without faults for CALM_S seconds, and is then killed RESTARTS times."""
    with tempfile.TemporaryDirectory(prefix="goodput-") as folder:
        live = begin(Path(folder))
        live.wait_event("first_step")
        time.sleep(CALM_S)
        saved = live.events("saved")
        rows = [json.loads(line) for line in live.run.metrics.read_text().splitlines()]
        for rank in range(RESTARTS):
            os.kill(live.ranks()[rank], signal.SIGKILL)
            time.sleep(BETWEEN_S)
        history = stop(live)
    steps = (rows[-1]["time"] - rows[4]["time"]) / (rows[-1]["step"] - rows[4]["step"])
    stall_s, save_s = (statistics.median(row[key] for row in saved) for key in ("stall_s", "seconds"))
    phases = {name: history["shares"][name] * history["supervised_s"] / RESTARTS for name in PHASES}
    phases["start"] += phases.pop("wait")
    return RunTimes(
        step_s=steps, stall_s=stall_s, save_s=save_s, **{f"{name}_s": seconds for name, seconds in phases.items()}
    )


def faulty(seconds: float, seed: int) -> dict[str, Any]:
    """Kill ranks at random times; return the history of the run and the number of kills."""
    draw, kills = random.Random(seed), list[float]()
    with tempfile.TemporaryDirectory(prefix="goodput-") as folder:
        live = begin(Path(folder))
        live.wait_event("first_step")
        began = time.monotonic()
        until = began + seconds
        while (now := time.monotonic()) < until:
            time.sleep(min(draw.expovariate(1 / MTBF_S), until - now))
            if time.monotonic() < until:
                pid = draw.choice(list(live.ranks().values()))
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    kills.append(time.monotonic() - began)
        return {**stop(live), "kills": kills}


def row_of(history: dict[str, Any], told: Goodput, mean: Goodput, seed: int) -> dict[str, Any]:
    """Compare a run with the prediction for its faults, and with the distribution over random faults, `mean`."""
    measured, predicted = history["shares"]["useful"], told.shares["useful"]
    return {
        "seed": seed,
        "kills": history["kills"],
        "measured": measured,
        "predicted": predicted,
        "low": mean.at(0.05),
        "high": mean.at(0.95),
        "shares": history["shares"],
        "reached": abs(measured - predicted) <= REACH,
    }


def main() -> int:
    """Measure, simulate, compare."""
    parser = Options(__doc__, quick={"runs": 1, "minutes": 3.0})
    parser.add_argument("--runs", type=int, default=4)
    parser.add_argument("--minutes", type=float, default=10.0, help="of each run")
    args = parser.parse_args()
    times, seconds = short_run(), 60 * args.minutes
    faults = Faults(RANKS, RANKS * MTBF_S, spares=10**6)
    mean = simulate(times, faults, SAVE_S, horizon_s=seconds)
    print(", ".join(f"{name} {value:.4f}" for name, value in vars(times).items()), flush=True)
    rows = []
    for seed in range(args.runs):
        history = faulty(seconds, seed)
        told = replay(times, faults, SAVE_S, history["kills"], horizon_s=seconds)
        rows.append(row_of(history, told, mean, seed))
    cells = [
        [
            str(row["seed"]),
            str(len(row["kills"])),
            *(f"{100 * row[key]:.1f}%" for key in ("measured", "predicted")),
            f"{100 * row['low']:.1f}% .. {100 * row['high']:.1f}%",
        ]
        for row in rows
    ]
    table(["seed", "kills", "measured", "predicted", "5 to 95 % of simulated runs"], cells)
    return finish(args, "goodput", rows, times=vars(times), predicted=mean.shares)


if __name__ == "__main__":
    sys.exit(main())
