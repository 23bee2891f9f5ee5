"""From the first rank's failure to the moment at which every other rank, on 4 nodes, has been told to stop.

The nodes of a box share this machine's clock, so the times that ranks write down can be compared. Rank 2 notes the time
and exits with 3; every other rank notes when SIGTERM reaches it.

    sudo .venv/bin/python benchmarks/failure_reaction.py [--box NAME] [--repeats 10] [--on ssh|pdsh]
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

REACH_S = 1.0
PROGRAM = """
import os, signal, sys, time
folder, rank = sys.argv[1], os.environ["RANK"]

def note(*_):
    with open(f"{folder}/{rank}.time", "w") as file:
        file.write(repr(time.time()))
    os._exit(3 if rank == "2" else 0)

signal.signal(signal.SIGTERM, note)
open(f"{folder}/{rank}.ready", "w").close()
ranks = int(os.environ["WORLD_SIZE"])
while rank == "2" and sum(name.endswith("ready") for name in os.listdir(folder)) < ranks:
    time.sleep(0.01)
if rank == "2":
    note()
time.sleep(1000)
"""


def once(folder: Path, box: str, transport: str) -> float:
    """Run the job once and return the seconds."""
    for old in folder.glob("*.*"):
        old.unlink()
    (folder / "job.yaml").write_text(
        f"nodes: 4\nranks_per_node: 2\ncommand: {json.dumps([sys.executable, '-c', PROGRAM, str(folder)])}\n"
    )
    done = subprocess.run(
        [
            *(sys.executable, "-m", "muster", "run", str(folder / "job.yaml"), "--runs", str(folder / "runs")),
            *("--hosts", f"box:{box}", "--on", transport),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 3, done.stderr
    times = {int(path.stem): float(path.read_text()) for path in folder.glob("*.time")}
    assert sorted(times) == list(range(8)), times
    return max(times.values()) - times[2]


def main() -> int:
    """Measure, report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--box", default="box", help="the name of a box that is up")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--on", choices=["ssh", "pdsh"], default="ssh")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as text:
        seconds = [once(Path(text), args.box, args.on) for _ in range(args.repeats)]
    median, slowest = statistics.median(seconds), max(seconds)
    print(f"all ranks told after {median:.3f} s (median), {slowest:.3f} s (slowest); reach {REACH_S:g}")
    print(json.dumps({"benchmark": "reaction to a failure", "on": args.on, "seconds": seconds, "reach": REACH_S}))
    return 0 if slowest <= REACH_S else 1


if __name__ == "__main__":
    sys.exit(main())
