"""The fault matrix: hurt a running job in every way that this machine allows, and compare its end with an unhurt run's.

    sudo .venv/bin/python benchmarks/chaos.py [--quick] [--only PATTERN] [--box NAME] [--in-place] [--json FILE]
    .venv/bin/python benchmarks/chaos.py --only 'random kills' [--kills 20] [--seed 0]

Every row starts a training of its own, hurts it by real means (signals, full and failing disks, changed files, links
cut), waits for its end, and says: detected in, resumed in (to the first new step), work lost, the weights and the
optimizer's state equal to the uninterrupted run's bit for bit, exit code and class. Rows of the box need one that is up
(`sudo muster box up`); what mounts needs root. `--quick` is the part that needs neither a box nor two minutes.
"""

import os
import platform
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from faults.bench import Bench
from faults.live import WaitedInVainError
from faults.matrix import ABSENT, FAULTS
from faults.state import NoStateError
from faults.table import BOX, HEAD, UNITS, Absent, Fault, Outcome, Row, line
from harness import Options, finish


def chosen(
    faults: Sequence[Fault], *, quick: bool, only: str, box: str, root: bool
) -> tuple[list[Fault], list[Absent]]:
    """Return the rows to run, and those that were meant and cannot be, with the reason."""
    run, left = [], []
    for fault in faults:
        if (quick and not fault.quick) or not re.search(only, fault.key):
            continue
        if fault.where == BOX and not box:
            left.append(Absent(fault.number, fault.name, "needs a box; give --box"))
        elif fault.root and not root:
            left.append(Absent(fault.number, fault.name, "mounts; run it as root"))
        else:
            run.append(fault)
    return run, left


def strike(fault: Fault, bench: Bench, *, timed: bool = True) -> Row:
    """Run one row; whatever it could not reach is a failure of the row, not the end of the matrix."""
    began = time.monotonic()
    try:
        outcome = fault.run(bench)
        # Ranks that join later make an attempt of their own.
        expected = replace(fault.expected, attempts=None) if bench.in_place else fault.expected
        failures = expected.failures(outcome, timed=timed)
    except (WaitedInVainError, NoStateError) as error:
        outcome, failures = Outcome(), [str(error)]
    return Row(fault, outcome, failures, time.monotonic() - began)


def main() -> int:
    """Run the rows, print the table, write the record."""
    parser = Options(__doc__, quick={}, note="only the rows that are quick and need no box")
    parser.add_argument("--only", default="", metavar="PATTERN", help="only rows whose number and name fit this")
    parser.add_argument("--box", default="", metavar="NAME", help="a box of four nodes that is up")
    parser.add_argument("--in-place", action="store_true", help="with restart.in_place in every job")
    parser.add_argument("--kills", type=int, default=20, help="how often the row `random kills` kills somebody")
    parser.add_argument("--seed", type=int, default=0, help="of that row")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep all run folders there")
    args = parser.parse_args()
    faults, left = chosen(FAULTS, quick=args.quick, only=args.only, box=args.box, root=os.geteuid() == 0)
    absent = [*left, *(each for each in ABSENT if not args.only)]
    print(f"{HEAD}\n{UNITS}")
    rows = []
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as text:
        keep, seed = args.keep is not None, args.seed
        where = args.keep or Path(text)
        bench = Bench(where, box=args.box, in_place=args.in_place, keep=keep, kills=args.kills, seed=seed)
        for fault in faults:
            rows.append(strike(fault, bench))
            print(line(rows[-1]), flush=True)
    for each in absent:
        print(f"not injected: {each.number} {each.name}: {each.reason}")
    facts = {"seconds": round(time.monotonic() - began, 1), "kernel": platform.release(), "seed": seed}
    return finish(args, "chaos", [row.record() for row in rows], absent=[vars(each) for each in absent], **facts)


if __name__ == "__main__":
    sys.exit(main())
