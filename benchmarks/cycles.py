"""200 start/stop cycles with 4 runs sharing the nodes of a box: failures of ports, and survivors.

Four runs at a time on the same four nodes, each a real `muster run --hosts box:NAME --on ssh` of a program whose ranks
meet at the store and then sleep; it is stopped at a random moment after they have met. A port failure is any run that
does not reach "joined"; a survivor any process with a run's id, on any node, 5 s after its end.

    sudo .venv/bin/python benchmarks/cycles.py [--cycles 200] [--box NAME]
"""

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from muster.jobs.basics.files import read_lines
from muster.jobs.runfolder.rundir import RunDir
from muster.launch.common.processes import of_run

LANES = 4
MEET_S = 60.0
LIMIT_S = 5.0
# A store client and nothing else: torch's import would be most of the cycle.
PROGRAM = """
import os, socket, time
with socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), timeout=20):
    print("met", flush=True)
    time.sleep(1000)
"""
JOB = """
name: cycle
nodes: 4
ranks_per_node: 2
grace_s: 1
command: {command}
"""


def cycle(lane: int, number: int, folder: Path, box: str, wait_s: float) -> dict[str, object]:
    """Start a run, wait until all ranks have met, stop it, and look for what is left."""
    runs = folder / f"runs-{number}"
    with (folder / f"{number}.err").open("w") as errors:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "muster", "run", str(folder / "job.yaml"), "--runs", str(runs)),
                *("--hosts", f"box:{box}", "--on", "ssh"),
            ],
            stdout=subprocess.DEVNULL,
            stderr=errors,
        )
    deadline = time.monotonic() + MEET_S
    met = False
    while not met and time.monotonic() < deadline and process.poll() is None:
        outs = list(runs.glob("*/attempt-000/rank-*.out"))
        met = len(outs) == 8 and all("met" in out.read_text() for out in outs)
        time.sleep(0.05)
    time.sleep(wait_s)
    process.send_signal(signal.SIGINT)
    code = process.wait(timeout=60)
    run = RunDir(next(runs.iterdir()))
    ended = time.monotonic()
    while (left := len(of_run(run.run_id))) and time.monotonic() - ended < LIMIT_S:
        time.sleep(0.05)
    verdict = next(iter(read_lines(run.attempts)), {})
    return {"lane": lane, "number": number, "met": met, "code": code, "left": left, "message": verdict.get("message")}


def main() -> int:
    """Cycle, count, report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cycles", type=int, default=200)
    parser.add_argument("--box", default="cycles", help="the name of a box that is up")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    moments = random.Random(args.seed)
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as text, ThreadPoolExecutor(LANES) as lanes:
        folder = Path(text)
        (folder / "job.yaml").write_text(JOB.replace("{command}", json.dumps([sys.executable, "-c", PROGRAM])))
        waits = [moments.uniform(0.0, 1.0) for _ in range(args.cycles)]
        work = [
            lanes.submit(cycle, number % LANES, number, folder, args.box, wait) for number, wait in enumerate(waits)
        ]
        for each in work:
            rows.append(each.result())
            print(json.dumps(rows[-1]), flush=True)
    failures = sum(not row["met"] for row in rows)
    survivors = sum(bool(row["left"]) for row in rows)
    print(f"{len(rows)} cycles, {LANES} at a time: {failures} did not meet, {survivors} left something; reach: 0 and 0")
    print(json.dumps({"benchmark": "start/stop cycles", "cycles": len(rows), "failures": failures, "left": survivors}))
    return 0 if failures == survivors == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
