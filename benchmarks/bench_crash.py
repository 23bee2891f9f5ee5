"""A process that measures dies or stands still: is its rank named, how soon does the row stand, is the rest measured?

`muster run` of a small benchmark on three ranks of this machine. While it measures, one rank's launch worker is hit
from outside, by a signal of any kind. To be met, each time: the row names that rank within 2 s (within timeout_s + 2 s
if it only stands still), every other operation is measured, the file is whole, and the exit code is 1.

    .venv/bin/python benchmarks/bench_crash.py [--quick]        12 runs, about 2 minutes; quick: rank 1 only, 4 runs
"""

import json
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from faults.live import start
from harness import Options, finish, table

from muster.jobs.basics.files import read_lines
from muster.jobs.machine import linux

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


def once(number: signal.Signals, rank: int, folder: Path) -> dict[str, Any]:
    """Run the benchmark, hit a rank's launch worker once some blocks stand, and read what came of it.

    `seconds` are from the signal to the row; `measured` counts the operations that were whole all the same.
    """
    live = start(folder / f"{number.name}-{rank}", JOB)
    try:
        out = live.run.attempt(0).bench
        live.wait("two blocks", lambda: sum(row["record"] == "block" for row in read_lines(out)) >= 2, LIMIT_S)
        (started,) = live.events("started")
        (worker,) = linux.descendants(dict(started["ranks"])[rank])[:1]
        hit = time.time()
        linux.kill_quietly(worker, number)
        code = live.end(LIMIT_S)
        records = list(read_lines(out))
    finally:
        live.kill()
    assert records[-1]["record"] == "end", f"{out}: the file has no end"
    bad = [row for row in records if row["record"] == "block" and row["state"] != "ok"]
    whole = set(OPERATIONS) - {row["cell"]["operation"] for row in bad}
    first = bad[0] if bad else {"rank": None, "time": float("inf"), "reason": "nothing failed"}
    allowed_s = REACH_S + (TIMEOUT_S if number is signal.SIGSTOP else 0.0)
    named, seconds = first["rank"] == rank, first["time"] - hit
    return {
        "name": f"{number.name} of rank {rank}",
        "named": named,
        "seconds": seconds,
        "measured": len(whole),
        "code": code,
        "reason": first["reason"],
        "reached": named and seconds <= allowed_s and len(whole) == len(OPERATIONS) - 1 and code == 1,
    }


def main() -> int:
    """Measure, report."""
    parser = Options(__doc__, quick={"ranks": [1]}, note="rank 1 only")
    parser.set_defaults(ranks=range(RANKS))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as text:
        rows = [once(number, rank, Path(text)) for number in SIGNALS for rank in args.ranks]
    cells = []
    for row in rows:
        others, named = f"{row['measured']}/{len(OPERATIONS) - 1}", "yes" if row["named"] else "NO"
        cells.append([row["name"], named, f"{row['seconds']:.2f}", others, str(row["code"]), row["reason"]])
    table(["signal", "named", "seconds", "others", "code", "reason"], cells)
    print(f"reach: named, within {REACH_S:g} s (+ timeout_s if stopped), all others measured")
    return finish(args, "crash of a benchmark's rank", rows, timeout_s=TIMEOUT_S)


if __name__ == "__main__":
    sys.exit(main())
