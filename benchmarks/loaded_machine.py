"""A soak on a loaded machine: no node may be taken for lost, for it only waits for a processor.

    sudo .venv/bin/python benchmarks/loaded_machine.py [--box NAME] [--minutes 60] [--load 30]

Processes that never pause load the machine. Beside them one run trains on four nodes of a box, and short runs on four
pretend nodes start one after the other, because a start is when the most is imported. Nothing is ever hurt, so every
run that fails, every second attempt, and every node that was given up is a false verdict.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from faults.bench import Bench
from faults.live import Live
from faults.work import job
from harness import Options, finish

START_S = 600.0  # on such a machine it takes long
BURN = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"


def verdicts(live: Live) -> list[str]:
    """Return why attempts of a run have failed."""
    return [str(row["message"]) for row in live.attempts() if row["code"] != 0]


def short_run(bench: Bench) -> list[str]:
    """Run a short job on four pretend nodes to its end; return what went wrong."""
    live = bench.start(job(nodes=4, steps=20, start_timeout_s=START_S))
    try:
        code = live.end(2 * START_S)
        return verdicts(live) or [live.last_words()] * (code != 0)
    finally:
        live.kill()
        bench.remove(live)


def soak(bench: Bench, minutes: float) -> tuple[int, list[str], list[str]]:
    """Train in the box while short runs come and go; return their number, what went wrong, and the warnings."""
    until, runs, wrong = time.monotonic() + 60 * minutes, 0, []
    live = bench.start_in_box(job(nodes=4, steps=10**7, start_timeout_s=START_S))
    try:
        while time.monotonic() < until and live.process.poll() is None:
            runs, wrong = runs + 1, wrong + short_run(bench)
            print(f"{runs} short runs, load {os.getloadavg()[0]:.0f}, {len(wrong)} false verdicts", flush=True)
        wrong += verdicts(live)
        warnings = [row["text"] for row in live.events("warning")]
        return runs, wrong, warnings
    finally:
        live.kill()


def main() -> int:
    """Load the machine, soak, report."""
    parser = Options(__doc__, quick={"minutes": 2.0})
    parser.add_argument("--box", default="box", help="the name of a box of four nodes that is up")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--load", type=int, default=30, help="processes that never pause")
    args = parser.parse_args()
    burners = [subprocess.Popen([sys.executable, "-c", BURN]) for _ in range(args.load)]
    try:
        with tempfile.TemporaryDirectory() as text:
            runs, wrong, warnings = soak(Bench(Path(text), box=args.box), args.minutes)
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()
    print("\n".join([*wrong, f"{len(wrong)} false verdicts in {args.minutes:g} minutes, {runs} short runs"]))
    row = {"name": "false verdicts", "reached": not wrong, "wrong": wrong, "runs": runs, "warnings": warnings}
    return finish(args, "loaded machine", [row], minutes=args.minutes, load=args.load)


if __name__ == "__main__":
    sys.exit(main())
