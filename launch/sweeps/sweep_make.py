"""A sweep, from its grids to its table. Every point is prepared before its folder is made and any point starts."""

import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from muster.jobs.basics.errors import JobFileError, MusterError, NotFoundError, UsageError
from muster.jobs.runfolder.rundir import RunDir, make_run
from muster.launch.common import screen
from muster.launch.look.comparison import compared
from muster.launch.look.comparison_view import table
from muster.launch.look.steps import Measured, read_measured
from muster.launch.records.runstate import read_state
from muster.launch.submit.prepare import Prepared, prepare
from muster.launch.submit.request import Request
from muster.launch.sweeps.sweep import (
    Grid,
    Point,
    SweepRecord,
    complaint,
    exit_code,
    points_of,
    summary,
    sweep_path,
)
from muster.launch.sweeps.sweep_run import Element, is_array, run_here, run_in_queue

# applied to a point's record with the words of its rate
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
SPARE: Final = ("took>", "exit>", "step>", "loss>", "run")


def check(request: Request, grids: Sequence[str]) -> None:
    """Refuse options that contradict each other.

    Raises:
        UsageError: if two options set the same key, or the transport cannot run sweeps.
    """
    options = {word.partition("=")[0]: f"--set {word.partition('=')[0]}" for word in request.overrides}
    options |= {"nodes": "-N"} if request.nodes is not None else {}
    options |= {"ranks_per_node": "-n"} if request.ranks_per_node is not None else {}
    for key in (word.partition("=")[0] for word in grids):
        if key in options:
            raise UsageError(f"--grid {key} and {options[key]} both set {key}; keep one of them")
    if request.on == "hand":
        raise UsageError("--on hand: a sweep starts its runs itself; choose another transport")


def prepare_points(request: Request, grids: list[Grid], limit: int | None, repeats: int) -> tuple[str, list[Element]]:
    """Prepare every point before anything starts; also return the name of the sweep.

    Raises:
        UsageError, JobFileError, RefusedError: if any point is wrong; with the errors of all points at once.
    """

    def attempt(point: Point, name: str | None) -> Prepared | MusterError:
        changed = replace(request, overrides=(*request.overrides, *point.overrides), name=name)
        try:
            return prepare(changed, allow_unread=True)
        except MusterError as error:
            return error

    nameless = points_of(grids, "point")
    tried = refuse_unread([attempt(point, request.name) for point in nameless])
    bad = [(point, each) for point, each in zip(nameless, tried, strict=True) if isinstance(each, MusterError)]
    if bad:
        raise complaint(bad, grids, len(nameless))
    first = tried[0]
    assert not isinstance(first, MusterError)
    if limit not in (None, 1) and not is_array(first.route):
        raise UsageError(f"--limit {limit}: is for Slurm arrays only; here points run one after another")
    name = first.context.job.name
    prepared = ((point, attempt(point, point.name)) for point in points_of(grids, name, repeats))
    return name, [Element(point, each) for point, each in prepared if not isinstance(each, MusterError)]


def refuse_unread(tried: list[Prepared | MusterError]) -> list[Prepared | MusterError]:
    """Replace points by errors if a key is read by none of them, unless all of them have its default value."""
    loaded = [each.loaded for each in tried if not isinstance(each, MusterError)]
    common = set.intersection(*(set(each.unread) for each in loaded)) if loaded else set()
    refused = [key for key in common if any(key not in each.idle for each in loaded)]
    return [
        each
        if isinstance(each, MusterError) or not refused
        else JobFileError("\n".join(f"{each.loaded.unread[key]}; remove it" for key in refused))
        for each in tried
    ]


def make_sweep(request: Request, name: str, elements: list[Element]) -> tuple[SweepRecord, Path]:
    """Make the sweep's folder beside its runs, with the record of its points.

    Raises:
        RunFolderError, StorageError: if it cannot be written.
    """
    first = elements[0].prepared
    folder = sweep_path(first.context.run.path.parent, name)
    make_run(RunDir(folder), shared=first.context.site.share == "group")
    record = SweepRecord(
        name=name,
        job=request.job if request.program else str(Path(request.job).absolute()),
        transport=first.route.transport,
        time=time.time(),
        points=tuple(each.point for each in elements),
        run_ids=tuple(each.run.run_id for each in elements),
    )
    record.write(folder)
    return record, folder


def execute(elements: list[Element], folder: Path, *, limit: int | None, keep_going: bool) -> bool:
    """Run the points; return False if the user stopped the sweep."""
    if is_array(elements[0].prepared.route):
        return run_in_queue(elements, folder, limit=limit)
    return run_here(elements, folder, keep_going=keep_going)


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
    runs = record.runs(folder)
    states = [read_state(run) if run.path.is_dir() else None for run in runs]
    rows = [summary(point, state) for point, state in zip(record.points, states, strict=True)]
    if as_json:
        print(json.dumps({"sweep": folder.name, "job": record.job, "points": rows}, indent=2))
    else:
        rates = (each.rate.words(each.unit) if each and each.rate else (None, None) for each in states)
        shown = ({**row, "words": words} for row, words in zip(rows, rates, strict=True))
        print(screen.table(tuple(COLUMNS), ([of(row) for of in COLUMNS.values()] for row in shown), spare=SPARE))
        if measured := measured_points(record, runs):
            print("", table(compared(measured, next(iter(measured)))), sep="\n")
    return exit_code([row["code"] for row in rows])
