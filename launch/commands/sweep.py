"""`muster sweep JOB.yaml --grid KEY=V,V ...`: the product of grids as runs of one job, and a table of how they went."""

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from muster.launch.common import screen
from muster.launch.common.options import add_json, add_request, given, whole
from muster.launch.sweeps.sweep import say

if TYPE_CHECKING:
    from muster.jobs.basics.errors import MusterError
    from muster.launch.submit.prepare import Prepared
    from muster.launch.submit.request import Request
    from muster.launch.sweeps.sweep import Grid, Point, SweepRecord
    from muster.launch.sweeps.sweep_run import Element

COLUMNS: Final[dict[str, Callable[[dict[str, Any]], object]]] = {  # of a point's record and the words of its rate
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


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_request(parser)
    parser.add_argument(
        "--grid",
        metavar="KEY=V,V",
        action="append",
        default=[],
        dest="grids",
        help="a key of the job and the values that it takes, such as nodes=1,2,4; all grids are combined",
    )
    limit = whole("--limit", least=1)
    parser.add_argument("--limit", metavar="N", type=limit, help="in Slurm: at most N points of an array at a time")
    parser.add_argument(
        "--keep-going",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="go on after a point that has failed (default: yes)",
    )
    parser.add_argument("--show", action="store_true", help="print the table of a sweep again; JOB is then the sweep")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Prepare every point, run them, print the table; the exit code is that of the first point that failed."""
    from muster.jobs.basics import exits
    from muster.jobs.basics.errors import MusterError
    from muster.jobs.runfolder.rundir import runs_root
    from muster.launch.submit.request import Request
    from muster.launch.sweeps.sweep import SweepRecord, find_sweep, read_grids

    if args.show:
        folder = find_sweep(runs_root(args.runs), args.job)
        return show(SweepRecord.read(folder), folder, as_json=args.json)
    request = given(args, Request)
    check(request, args.grids)
    name, elements = prepare_points(request, read_grids(args.grids), args.limit)
    record, folder = make_sweep(request, name, elements)
    print(f"sweep {folder}", file=sys.stderr)
    try:
        whole = execute(elements, folder, limit=args.limit, keep_going=args.keep_going)
    except MusterError:
        if not any(each.run.path.exists() for each in elements):  # refused: nothing was submitted
            shutil.rmtree(folder, ignore_errors=True)
        raise
    code = show(record, folder, as_json=args.json)
    return code if whole else exits.STOPPED


def check(request: "Request", grids: Sequence[str]) -> None:
    """Refuse options that contradict one another.

    Raises:
        UsageError: they do.
    """
    from muster.jobs.basics.errors import UsageError

    options = {word.partition("=")[0]: f"--set {word.partition('=')[0]}" for word in request.overrides}
    options |= {"nodes": "-N"} if request.nodes is not None else {}
    options |= {"ranks_per_node": "-n"} if request.ranks_per_node is not None else {}
    for key in (word.partition("=")[0] for word in grids):
        if key in options:
            raise UsageError(f"--grid {key} and {options[key]} both set {key}; keep one of them")
    if request.on == "hand":
        raise UsageError("--on hand: a sweep starts its runs itself; choose another transport")


def prepare_points(request: "Request", grids: "list[Grid]", limit: int | None) -> "tuple[str, list[Element]]":
    """Prepare every point before anything starts; return also the name of the sweep.

    Raises:
        UsageError, JobFileError, RefusedError: what is wrong with any of them, all at once.
    """
    from dataclasses import replace

    from muster.jobs.basics.errors import MusterError, UsageError
    from muster.launch.submit.prepare import prepare
    from muster.launch.sweeps.sweep import complaint, points_of
    from muster.launch.sweeps.sweep_run import Element, is_array

    def attempt(point: "Point", name: str | None) -> "Prepared | MusterError":
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
        raise UsageError(f"--limit {limit}: is for arrays of Slurm's; here points run one after another")
    name = first.context.job.name
    prepared = ((point, attempt(point, point.name)) for point in points_of(grids, name))
    return name, [Element(point, each) for point, each in prepared if not isinstance(each, MusterError)]


def refuse_unread(tried: "list[Prepared | MusterError]") -> "list[Prepared | MusterError]":
    """Put an error in the place of each point with a key that no point reads, if the key has values that matter."""
    from muster.jobs.basics.errors import JobFileError, MusterError

    loaded = [each.loaded for each in tried if not isinstance(each, MusterError)]
    common = set.intersection(*(set(each.unread) for each in loaded)) if loaded else set()
    refused = [key for key in common if any(key not in each.idle for each in loaded)]
    return [
        each
        if isinstance(each, MusterError) or not refused
        else JobFileError("\n".join(f"{each.loaded.unread[key]}; remove it" for key in refused))
        for each in tried
    ]


def make_sweep(request: "Request", name: str, elements: "list[Element]") -> "tuple[SweepRecord, Path]":
    """Make the sweep's folder beside its runs, with the record of what belongs to it.

    Raises:
        RunFolderError, StorageError: it cannot be written.
    """
    from muster.jobs.runfolder.rundir import RunDir, make_run
    from muster.launch.sweeps.sweep import SweepRecord, sweep_path

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


def execute(elements: "list[Element]", folder: Path, *, limit: int | None, keep_going: bool) -> bool:
    """Run the points; return False when the user ended the sweep."""
    from muster.jobs.runfolder.rundir import RunDir
    from muster.launch.sweeps.sweep_run import is_array, run_here, submit_arrays

    if not is_array(elements[0].prepared.route):
        return run_here(elements, folder, say, keep_going=keep_going)
    from muster.launch.sweeps.sweep_follow import follow

    submit_arrays(elements, folder, say, limit=limit)
    return follow(((each.point, each.run) for each in elements), say) and not RunDir(folder).stop.exists()


def show(record: "SweepRecord", folder: Path, *, as_json: bool) -> int:
    """Print the table of a sweep as it is now; return the exit code of its first point that failed."""
    from muster.launch.records.runstate import read_state
    from muster.launch.sweeps.sweep import exit_code, summary

    runs = record.runs(folder)
    states = [read_state(run) if run.path.is_dir() else None for run in runs]
    rows = [summary(point, state) for point, state in zip(record.points, states, strict=True)]
    if as_json:
        print(json.dumps({"sweep": folder.name, "job": record.job, "points": rows}, indent=2))
    else:
        rates = (each.rate.words(each.unit) if each and each.rate else (None, None) for each in states)
        shown = ({**row, "words": words} for row, words in zip(rows, rates, strict=True))
        print(screen.table(tuple(COLUMNS), ([of(row) for of in COLUMNS.values()] for row in shown), spare=SPARE))
    return exit_code([row["code"] for row in rows])
