"""The table of a sweep and the states of its points, for `muster sweep --show`, `status SWEEP` and `why SWEEP`."""

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from textwrap import indent
from typing import Any, Final

from muster.jobs.basics.errors import NotFoundError
from muster.jobs.runfolder.rundir import RunDir
from muster.launch.bench.measuring import has_rows
from muster.launch.common import screen
from muster.launch.look.comparison import compared
from muster.launch.look.comparison_view import table
from muster.launch.look.steps import Measured, read_measured
from muster.launch.records.runstate import RunState, read_state
from muster.launch.sweeps.sweep import SweepRecord, exit_code, summary
from muster.launch.sweeps.sweep_bench import KINDS, bench_rows, bench_table

# each function computes a cell from a point's summary and its formatted rate
COLUMNS: Final[dict[str, Callable[[dict[str, Any]], object]]] = {
    "point": lambda row: row["point"],
    "state": lambda row: row["state"],
    "exit>": lambda row: row["code"],
    "took>": lambda row: screen.duration(row["seconds"]),
    "step>": lambda row: row["step"] if row["steps"] is None else f"{row['step']} of {row['steps']}",
    "loss>": lambda row: None if row["loss"] is None else f"{row['loss']:.4f}",
    "median rate>": lambda row: row["words"][0],
    "middle half": lambda row: row["words"][1],
    "run": lambda row: row["run_id"],
}
WRONG: Final = ("failed", "stopped", "lost")
SPARE: Final = ("took>", "exit>", "step>", "loss>", "run")


def states_of(record: SweepRecord, folder: Path) -> list[RunState | None]:
    """Return the state of every point; None if its run has not begun. Errors as for `SweepRecord.runs`."""
    return [read_state(run) if run.events.exists() else None for run in record.runs(folder)]


def explained(folder: Path, explain: Callable[[RunDir], Any], render: Callable[[Any], str], *, as_json: bool) -> str:
    """Explain the points that failed, were stopped or were lost, below the number of points in each state.

    `explain`, `render`: those of `muster why`, for one run. Errors as for `SweepRecord.read`.
    """
    record = SweepRecord.read(folder)
    states = states_of(record, folder)
    wrong = [
        (point, explain(run))
        for point, run, state in zip(record.points, record.runs(folder), states, strict=True)
        if state is not None and state.state in WRONG
    ]
    if as_json:
        points = [{"point": point.label, **each.to_json()} for point, each in wrong]
        return json.dumps({"sweep": folder.name, "states": record.counts(states), "points": points}, indent=2)
    texts = [f"point {point.label}\n{indent(render(each), '  ')}" for point, each in wrong]
    return "\n\n".join([f"{folder.name}: {record.counts(states)}", *texts])


def measured_points(record: SweepRecord, runs: Sequence[RunDir]) -> dict[str, list[Measured]]:
    """Return the measured steps of every point, with repeats in one list; points without a step are omitted."""
    found: dict[str, list[Measured]] = {}
    for point, run in zip(record.points, runs, strict=True):
        with suppress(NotFoundError):
            measured = read_measured(run)
            found.setdefault(point.label or record.name, []).append(measured)
    return found


def show(record: SweepRecord, folder: Path, *, as_json: bool) -> int:
    """Print the current table of a sweep; return the exit code of its first failed point."""
    runs, states = record.runs(folder), states_of(record, folder)
    rows = [summary(point, state) for point, state in zip(record.points, states, strict=True)]
    numbers = _numbers(record, runs, states)
    if as_json:
        print(json.dumps({"sweep": folder.name, "job": record.job, "points": rows, "measured": numbers}, indent=2))
    else:
        rates = (each.rate.words(each.unit) if each and each.rate else (None, None) for each in states)
        shown = ({**row, "words": words} for row, words in zip(rows, rates, strict=True))
        print(screen.table(tuple(COLUMNS), ([of(row) for of in COLUMNS.values()] for row in shown), spare=SPARE))
        if measured := measured_points(record, runs):
            print("", table(compared(measured, next(iter(measured)))), sep="\n")
        if numbers:
            print("", bench_table(numbers), sep="\n")
    return exit_code([row["code"] for row in rows])


def _numbers(record: SweepRecord, runs: Sequence[RunDir], states: Sequence[RunState | None]) -> list[dict[str, Any]]:
    """Return the results of a sweep of benchmarks; empty for other kinds of job."""
    groups: dict[str, list[Path]] = {}
    kind = next((state.kind for state in states if state is not None), None)
    if kind not in KINDS:
        return []
    for point, run in zip(record.points, runs, strict=True):
        if has_rows(run):
            groups.setdefault(point.label or record.name, []).append(run.path)
    return bench_rows(kind, groups)
