"""One harness for all benchmarks: options, sides in turns, ratios, a table, one record of JSON, and child processes.

    args = Options(__doc__, repeats=9, quick={"repeats": 3}).parse_args()    --repeats, --json FILE, --quick
    times = turns({"ours": run, "theirs": other}, args.repeats)              A B B A; with three A B C C B A
    row = compare("start", times["ours"], times["theirs"], reach=0.35)       medians, the median of the paired ratios
    return finish(args, "start", [row])                                      the verdict, the record, the exit code

Absolute times on a shared machine drift; a ratio of neighbours in time does not. Ranks are started by `ranks.py`.
"""

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

CLOCKS = ("cpu", "wall")
T = TypeVar("T")


# Options, and what a script says at its end.


class Options(argparse.ArgumentParser):
    """The command line of a benchmark: --json FILE, --repeats if there are any, and --quick with what it changes."""

    def __init__(
        self, doc: str | None, *, repeats: int | None = None, quick: Mapping[str, Any] | None = None, note: str = ""
    ) -> None:
        super().__init__(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
        self.quick = dict(quick or {})
        self.add_argument("--json", type=Path, metavar="FILE", help="write the record there, not to standard output")
        if repeats is not None:
            self.add_argument("--repeats", type=int, default=repeats)
        if quick is not None:
            changes = ", ".join(f"{name} {value}" for name, value in self.quick.items())
            self.add_argument("--quick", action="store_true", help=note or changes)

    def parse_args(self, *words: Any, **more: Any) -> Any:
        """Parse; with --quick, replace the values that it names."""
        args = super().parse_args(*words, **more)
        vars(args).update(self.quick if getattr(args, "quick", False) else {})
        return args


def numbers(text: str) -> list[int]:
    """Parse whole numbers with commas."""
    return [int(each) for each in text.split(",")]


def verdict(reached: bool, reach: float | None, sign: str = "<=") -> str:
    """Write whether a claim holds; a row without a reach only stands beside."""
    return "(beside)" if reach is None else f"{sign} {reach:.2f}: {'yes' if reached else 'NO'}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print columns as wide as they need to be; those of numbers end together."""
    lines = [list(head), *map(list, rows)]
    columns = list(zip(*lines, strict=True))
    for line in lines:
        cells = []
        for cell, column in zip(line, columns, strict=True):
            numeric = all(each[:1] in "+-.0123456789" for each in column[1:])
            width = max(map(len, column))
            cells.append(cell.rjust(width) if numeric else cell.ljust(width))
        print("  ".join(cells).rstrip(), flush=True)


def finish(args: Any, benchmark: str, rows: Sequence[Mapping[str, Any]], **more: Any) -> int:
    """Print whether all rows are in reach, and the record; return the exit code."""
    reached = bool(rows) and all(row["reached"] for row in rows)
    print(f"{benchmark}: {sum(bool(row['reached']) for row in rows)} of {len(rows)} rows in reach, all of it: ", end="")
    print("yes" if reached else "NO", flush=True)
    machine = {"cores": os.cpu_count(), "python": platform.python_version()}
    record = {"benchmark": benchmark, "reached": reached, **machine, **more, "rows": rows}
    if args.json:
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    else:
        print(json.dumps(record))
    return 0 if reached else 1


# Sides and ratios.


def turns(sides: Mapping[str, Callable[[], T]], repeats: int, *, warm_up: int = 0) -> dict[str, list[T]]:
    """Measure every side `repeats` times, A B C C B A; what the first `warm_up` rounds return is dropped."""
    found: dict[str, list[T]] = {side: [] for side in sides}
    for repeat in range(-warm_up, repeats):
        for side in list(sides)[:: 1 if repeat % 2 == 0 else -1]:
            value = sides[side]()
            if repeat >= 0:
                found[side].append(value)
    return found


def ratio_of(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, Any]:
    """Return both sides' times, the ratio of each pair, and the median of those."""
    ratios = [one / other for one, other in zip(ours, theirs, strict=True)]
    return {"ratio": statistics.median(ratios), "ratios": ratios, "ours": list(ours), "theirs": list(theirs)}


def spread(row: Mapping[str, Any]) -> str:
    """Write a median ratio with the least and the largest."""
    return f"{row['ratio']:.3f} ({min(row['ratios']):.3f} .. {max(row['ratios']):.3f})"


def compare(
    name: str, ours: Sequence[float], theirs: Sequence[float], *, reach: float, unit: str = "s", **more: Any
) -> dict[str, Any]:
    """Print medians and the median of the paired ratios with its spread; return the row."""
    row = ratio_of(ours, theirs)
    row |= {"name": name, "reach": reach, "reached": row["ratio"] <= reach, "unit": unit, **more}
    print(name)
    for side in ("ours", "theirs"):
        times = row[side]
        found = f"min {min(times):.4f}, max {max(times):.4f}, n {len(times)}"
        print(f"  {side:7} {statistics.median(times):.4f} {unit}   ({found})")
    print(f"  ratio   {spread(row)}; reach {verdict(row['reached'], reach)}", flush=True)
    return row


def by_clock(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]], steps: int = 1) -> dict[str, Any]:
    """Compare two sides that `timed` measured in blocks of steps: by clock, as `ratio_of`, of one step."""
    sides = ([[each / steps for each in clock] for clock in zip(*side, strict=True)] for side in (ours, theirs))
    return {clock: ratio_of(*pair) for clock, pair in zip(CLOCKS, zip(*sides, strict=True), strict=True)}


def clock_cells(row: Mapping[str, Any]) -> list[str]:
    """Write the two columns of what `by_clock` found: milliseconds of ours and theirs, and the ratio."""
    cells = []
    for clock in CLOCKS:
        mine, theirs = (1e3 * statistics.median(row[clock][side]) for side in ("ours", "theirs"))
        cells.append(f"{mine:.1f} / {theirs:.1f} ms {row[clock]['ratio']:6.3f}")
    return cells


# Child processes.


class Ran(NamedTuple):
    """A command that has ended well."""

    seconds: float
    cpu_s: float  # of all its descendants that were waited for
    out: str


def command(argv: Sequence[str], *, until: str = "", env: Mapping[str, str] | None = None, reap: bool = False) -> Ran:
    """Run a command to its end; the clock stops at the first line of its output that begins with `until`, if given.

    With `reap`, also wait for what it left behind, which a process that adopts orphans gets.

    Raises:
        SystemExit: the command failed, or no such line came.
    """
    before, began = _cpu_of_children(), perf_counter()
    lines, stopped = [], None
    with tempfile.TemporaryFile("w+") as errors:
        environment = {**os.environ, **(env or {})}
        with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment) as process:
            for line in process.stdout or ():
                lines.append(line)
                if until and stopped is None and line.startswith(until):
                    stopped = perf_counter()
        ended, code = perf_counter(), process.returncode
        while reap:
            try:
                os.wait()
            except ChildProcessError:
                break
        if code or (until and stopped is None):
            errors.seek(0)
            raise SystemExit(f"{' '.join(argv)} ended with {code}\n{''.join(lines)}{errors.read()}")
    return Ran((stopped or ended) - began, _cpu_of_children() - before, "".join(lines))


def _cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
