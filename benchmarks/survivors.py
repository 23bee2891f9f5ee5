"""SIGKILL of `muster run` at a random moment: how many processes of the run are left 5 s later, and when the last went.

Two jobs in turn: training with data-loader children, and a program that ignores HUP, INT and TERM and starts a
child in a session of its own. A process belongs to the run when the environment that it was started with says so.

    .venv/bin/python benchmarks/survivors.py [--times 50]
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from muster.launch.common.processes import of_run

JOBS = {
    "training": """
name: training
nodes: 2
train: {model: vgg11, data: digits, mode: ddp, batch_size: 32, epochs: 50, loader_workers: 2}
""",
    "stubborn": """
name: stubborn
nodes: 2
ranks_per_node: 2
command: [{python}, {script}]
""",
}
LIMIT_S = 5.0


def kill_once(job: Path, folder: Path, wait_s: float) -> tuple[int, int, float]:
    """Start a job, kill its supervisor after a while; return processes before, left after 5 s, seconds to none."""
    runs = folder / f"runs-{time.monotonic_ns()}"
    process = subprocess.Popen(
        [sys.executable, "-m", "muster", "run", str(job), "--runs", str(runs)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while not runs.is_dir() or not any(runs.iterdir()):
        time.sleep(0.01)
    time.sleep(wait_s)
    run_id = next(runs.iterdir()).name
    before = len(of_run(run_id))
    process.kill()
    process.wait()
    killed = time.monotonic()
    while (left := len(of_run(run_id))) and time.monotonic() - killed < LIMIT_S:
        time.sleep(0.02)
    return before, left, time.monotonic() - killed


def main() -> int:
    """Kill, count, report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    moments = random.Random(args.seed)
    rows = []
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        for name, body in JOBS.items():
            script = json.dumps(str(Path(__file__).with_name("stubborn.py")))
            filled = body.replace("{python}", json.dumps(sys.executable)).replace("{script}", script)
            (folder / f"{name}.yaml").write_text(filled)
        for time_number in range(args.times):
            name = list(JOBS)[time_number % len(JOBS)]
            before, left, gone_s = kill_once(folder / f"{name}.yaml", folder, moments.uniform(0.0, 4.0))
            rows.append({"job": name, "before": before, "left": left, "gone_s": round(gone_s, 3)})
            print(
                f"{time_number + 1:>3}  {name:<9} {before:>3} processes, {left} left after {gone_s:.2f} s", flush=True
            )
    clean = sum(row["left"] == 0 for row in rows)
    slowest = max(row["gone_s"] for row in rows)
    median = statistics.median(row["gone_s"] for row in rows)
    print(
        f"clean {clean} of {len(rows)}; all gone after {median:.2f} s (median), {slowest:.2f} s (slowest); "
        "reach: all within 5 s"
    )
    print(json.dumps({"benchmark": "survivors of SIGKILL", "clean": clean, "times": len(rows), "rows": rows}))
    return 0 if clean == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
