"""What runs leave behind: processes that live on 5 s after the end. One belongs to a run when its environment says so.

sigkill   SIGKILL of `muster run` at a random moment, of two jobs in turn: training with data-loader children, and a
          program that ignores HUP, INT and TERM and starts a child in a session of its own (stubborn.py)
cycles    starts and stops with 4 runs sharing the nodes of a box, each a real `muster run --on ssh` of a program
          whose ranks meet at the store and then sleep; it is stopped at a random moment after they have met.
          A port failure is any run whose ranks do not meet

.venv/bin/python benchmarks/survivors.py sigkill [--times 50] [--seed 0] [--json FILE]
sudo .venv/bin/python benchmarks/survivors.py cycles [--times 200] [--box NAME]
"""

import argparse
import json
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from faults.bench import in_box
from faults.live import Live, WaitedInVainError, start
from harness import Options, finish

from muster.launch.common.processes import of_run

Row = dict[str, Any]
LANES = 4
MEET_S = 60.0
LIMIT_S = 5.0
TIMES = {"sigkill": 50, "cycles": 200}
# A store client and nothing else: torch's import would be most of the cycle.
PROGRAM = """
import os, socket, time
with socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), timeout=20):
    print("met", flush=True)
    time.sleep(1000)
"""
TRAINING = """
name: training
nodes: 2
train: {model: vgg11, data: digits, mode: ddp, batch_size: 32, epochs: 50, loader_workers: 2}
"""


def program(name: str, nodes: int, *command: str) -> str:
    """Return a job of two ranks a node."""
    described = {"name": name, "nodes": nodes, "ranks_per_node": 2, "grace_s": 1, "command": [sys.executable, *command]}
    return json.dumps(described)


JOBS = {"training": TRAINING, "stubborn": program("stubborn", 2, str(Path(__file__).with_name("stubborn.py")))}


def survivors(live: Live) -> dict[str, Any]:
    """Wait until nothing of a run is left, or 5 s; return how many are left, and the seconds."""
    run_id, ended = live.run.run_id, time.monotonic()
    while (left := len(of_run(run_id))) and time.monotonic() - ended < LIMIT_S:
        time.sleep(0.02)
    return {"left": left, "gone_s": round(time.monotonic() - ended, 3)}


def sigkill(folder: Path, number: int, wait_s: float, box: str) -> Row:
    """Start a job, kill its supervisor after a while, and count."""
    name = list(JOBS)[number % len(JOBS)]
    live = start(folder, JOBS[name])
    run_id = live.run.run_id
    time.sleep(wait_s)
    before = len(of_run(run_id))
    live.process.kill()
    live.process.wait()
    row: Row = {"name": name, "before": before, **survivors(live)}
    return row | {"reached": not row["left"]}


def cycle(folder: Path, number: int, wait_s: float, box: str) -> Row:
    """Start a run, wait until all ranks have met, stop it, and look for what is left."""
    live = start(folder, program("cycle", 4, "-c", PROGRAM), *in_box(box))

    def all_met() -> bool:
        outs = list(live.root.glob("*/attempt-000/rank-*.out"))
        return len(outs) == 8 and all("met" in out.read_text() for out in outs)

    try:
        live.wait("the ranks to meet", all_met, MEET_S)
        met = True
    except WaitedInVainError:
        met = False
    time.sleep(wait_s)
    live.process.send_signal(signal.SIGINT)
    code = live.process.wait(timeout=60)
    found = survivors(live)
    message = next((row.get("message") for row in live.attempts()), None)
    name = f"cycle {number}"
    return {"name": name, "met": met, "code": code, **found, "message": message, "reached": met and not found["left"]}


def all_of(args: argparse.Namespace, folder: Path) -> list[Row]:
    """Do one thing so many times; print each row."""
    do, lanes, longest_s = (sigkill, 1, 4.0) if args.what == "sigkill" else (cycle, LANES, 1.0)
    moments, rows = random.Random(args.seed), []
    with ThreadPoolExecutor(lanes) as pool:
        work = [
            pool.submit(do, folder / str(number), number, moments.uniform(0.0, longest_s), args.box)
            for number in range(args.times or TIMES[args.what])
        ]
        for each in work:
            rows.append(each.result())
            print(json.dumps(rows[-1]), flush=True)
    return rows


def report(rows: Sequence[Row]) -> None:
    """Print what came of all."""
    gone = [row["gone_s"] for row in rows]
    print(f"{sum(not row['left'] for row in rows)} of {len(rows)} left nothing after {LIMIT_S:g} s; ", end="")
    print(f"all gone after {statistics.median(gone):.2f} s (median), {max(gone):.2f} s (slowest); ", end="")
    print(f"{sum(not row.get('met', True) for row in rows)} did not meet")


def main() -> int:
    """Kill or stop, count, report."""
    parser = Options(__doc__, quick={"times": 4})
    parser.add_argument("what", choices=TIMES)
    parser.add_argument("--times", type=int, help="default: 50; 200 cycles")
    parser.add_argument("--box", default="cycles", help="the name of a box that is up")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as text:
        rows = all_of(args, Path(text))
    report(rows)
    return finish(args, f"survivors of {args.what}", rows)


if __name__ == "__main__":
    sys.exit(main())
