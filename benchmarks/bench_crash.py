"""A process that measures dies or stands still: is its rank named, how soon does the row stand, is the rest measured?

`muster run` of a small benchmark on three ranks of this machine. While it measures, one rank's player is hit from
outside, by a signal of any kind. To be met, each time: the row names that rank within 2 s (within timeout_s + 2 s if
it only stands still), every other operation is measured, the file is whole, and the exit code is 1.

    .venv/bin/python benchmarks/bench_crash.py [--quick]        12 runs, about 2 minutes; quick: rank 1 only, 4 runs
"""

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from muster.jobs.basics.files import read_lines
from muster.jobs.machine import linux
from muster.jobs.runfolder.rundir import list_runs

TIMEOUT_S = 2.0
REACH_S = 2.0
LIMIT_S = 60.0
RANKS = 3
OPERATIONS = ["all_reduce", "broadcast", "all_to_all", "barrier"]
JOB = f"""
ranks_per_node: {RANKS}
bench: {{operation: {json.dumps(OPERATIONS)}, sizes: "64K:1M:4", launches: 1, block_s: 0.4, timeout_s: {TIMEOUT_S}}}
"""
SIGNALS = (signal.SIGKILL, signal.SIGABRT, signal.SIGSEGV, signal.SIGSTOP)


@dataclass(frozen=True)
class Outcome:
    """One run: `seconds` from the signal to the row; `measured` counts the operations that were whole all the same."""

    signal: str
    rank: int
    named: bool
    seconds: float
    measured: int
    code: int
    reason: str

    @property
    def reached(self) -> bool:
        """True when all that was to be met is."""
        allowed_s = REACH_S + (TIMEOUT_S if self.signal == "SIGSTOP" else 0.0)
        return self.named and self.seconds <= allowed_s and self.measured == len(OPERATIONS) - 1 and self.code == 1


def once(number: signal.Signals, rank: int, folder: Path) -> Outcome:
    """Run the benchmark, hit a rank's player once some blocks stand, and read what came of it."""
    (folder / "job.yaml").write_text(JOB)
    runs = folder / f"runs-{number.name}-{rank}"
    argv = [sys.executable, "-m", "muster", "run", str(folder / "job.yaml"), "--runs", str(runs)]
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        wait_until(lambda: list_runs(runs))
        run = list_runs(runs)[0]
        out = run.attempt(0).bench
        wait_until(lambda: sum(row["record"] == "block" for row in read_lines(out)) >= 2)
        (started,) = (row for row in read_lines(run.events) if row["event"] == "started")
        conductor = dict(started["ranks"])[rank]
        (player,) = linux.descendants(conductor)[:1]
        hit = time.time()
        linux.kill_quietly(player, number)
        code = process.wait(timeout=LIMIT_S)
    rows: list[dict[str, Any]] = list(read_lines(out))
    assert rows[-1]["record"] == "end", f"{out}: the file has no end"
    blocks = [row for row in rows if row["record"] == "block"]
    bad = [row for row in blocks if row["state"] != "ok"]
    whole = set(OPERATIONS) - {row["cell"]["operation"] for row in bad}
    first = bad[0] if bad else {"rank": None, "time": float("inf"), "reason": "nothing failed"}
    return Outcome(number.name, rank, first["rank"] == rank, first["time"] - hit, len(whole), code, first["reason"])


def wait_until(condition: Any) -> None:
    """Wait for a condition with a deadline."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def main() -> int:
    """Measure, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="rank 1 only")
    args = parser.parse_args()
    outcomes = []
    print(f"{'signal':<8} {'rank':>4} {'named':>6} {'seconds':>8} {'others':>7} {'code':>5}  reason")
    with tempfile.TemporaryDirectory() as text:
        for number in SIGNALS:
            for rank in [1] if args.quick else range(RANKS):
                one = once(number, rank, Path(text))
                outcomes.append(one)
                others = f"{one.measured}/{len(OPERATIONS) - 1}"
                named = "yes" if one.named else "NO"
                place = f"{one.signal:<8} {one.rank:>4} {named:>6}"
                print(f"{place} {one.seconds:>8.2f} {others:>7} {one.code:>5}  {one.reason}")
    reached = all(one.reached for one in outcomes)
    reach = f"named, within {REACH_S:g} s (+ timeout_s if stopped), all others measured"
    print(f"reach: {reach}: {'yes' if reached else 'NO'}")
    record = {"benchmark": "crash of a benchmark's rank", "reached": reached, "timeout_s": TIMEOUT_S}
    print(json.dumps({**record, "runs": [asdict(one) for one in outcomes]}))
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
