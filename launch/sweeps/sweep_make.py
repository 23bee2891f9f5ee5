"""The steps of `muster sweep`: prepare all points, create their folders and the sweep's, run the points."""

import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from muster.jobs.basics.errors import JobFileError, MusterError, UsageError
from muster.jobs.runfolder.rundir import RunDir, make_run
from muster.launch.common import screen
from muster.launch.submit.prepare import PreparedSubmission, prepare
from muster.launch.submit.request import Request
from muster.launch.submit.start import check_torch, copied, write_run
from muster.launch.sweeps.grids import Axis
from muster.launch.sweeps.sweep import SweepPoint, SweepRecord, complaint, points_of, sweep_path
from muster.launch.sweeps.sweep_run import PointRun, run_here, run_in_queue


@dataclass(frozen=True)
class Element:
    """One prepared point of a sweep, before its run folder is written."""

    point: SweepPoint
    prepared: PreparedSubmission


def check(request: Request, words: Sequence[tuple[str, str]]) -> None:
    """Refuse options that contradict each other. `words`: the values of `--grid` and `--zip`, each with its option.

    Raises:
        UsageError: if two options set the same key, or the transport cannot run sweeps.
    """
    options = {word.partition("=")[0]: f"--set {word.partition('=')[0]}" for word in request.overrides}
    options |= {"nodes": "-N"} if request.nodes is not None else {}
    options |= {"ranks_per_node": "-n"} if request.ranks_per_node is not None else {}
    for option, key in ((option, word.partition("=")[0]) for option, word in words):
        if key in options:
            raise UsageError(f"{option} {key} and {options[key]} both set {key}; keep one of them")
    if request.on == "hand":
        raise UsageError("--on hand: a sweep starts its runs itself; choose another transport")


def prepare_points(request: Request, grids: list[Axis], limit: int | None, repeats: int) -> tuple[str, list[Element]]:
    """Prepare every point before any run starts; return the sweep's name and the points.

    Raises:
        UsageError, JobFileError, RefusedError: if a point is invalid. The message lists the errors of all points.
    """

    def attempt(point: SweepPoint, name: str | None) -> PreparedSubmission | MusterError:
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
    if limit not in (None, 1) and not first.route.is_queued:
        raise UsageError(
            f"--limit {limit}: is for Slurm arrays only, but these points run one after another; remove it"
        )
    name = first.context.job.name
    prepared = ((point, attempt(point, point.name)) for point in points_of(grids, name, repeats))
    return name, [Element(point, each) for point, each in prepared if not isinstance(each, MusterError)]


def refuse_unread(tried: list[PreparedSubmission | MusterError]) -> list[PreparedSubmission | MusterError]:
    """Return `tried`. If a point sets a key that no point reads, all points are replaced by errors."""
    loaded = [each.loaded for each in tried if not isinstance(each, MusterError)]
    common = set.intersection(*(set(each.unread) for each in loaded)) if loaded else set()
    refused = [key for key in common if any(key not in each.idle for each in loaded)]
    return [
        each
        if isinstance(each, MusterError) or not refused
        else JobFileError("\n".join(f"{each.loaded.unread[key]}; remove it" for key in refused))
        for each in tried
    ]


def make_sweep(request: Request, name: str, elements: list[Element]) -> tuple[SweepRecord, Path, list[PointRun]]:
    """Create the run folders of all points, the sweep's folder beside them, and the record; on failure remove them.

    Raises:
        RefusedError: if the working folder is too large to copy, or the points need torch, which is missing.
        RunFolderError, StorageError: if a folder or the record cannot be written.
    """
    first = elements[0].prepared
    folder = sweep_path(first.context.run.path.parent, name)
    make_run(RunDir(folder), shared=first.context.site.share == "group")
    try:
        points = write_points(elements, folder)
        record = SweepRecord(
            name=name,
            job=request.job if request.program else str(Path(request.job).absolute()),
            transport=first.route.transport,
            time=time.time(),
            points=tuple(each.point for each in elements),
            run_ids=tuple(each.run.run_id for each in points),
        )
        record.write(folder)
    except BaseException:
        for path in (folder, *(each.prepared.context.run.path for each in elements)):
            shutil.rmtree(path, ignore_errors=True)
        raise
    return record, folder, points


def write_points(elements: Sequence[Element], folder: Path) -> list[PointRun]:
    """Create the run folders. In a queue they share one copy of the code, unless their working folders differ.

    All are created before the first run begins, so that a stopped sweep can be resumed with the settings it had.
    """
    prepared = [each.prepared for each in elements]
    for each in prepared:
        check_torch(each.submission)
    if not prepared[0].route.is_queued:
        written = [write_run(each) for each in prepared]
    elif len({(each.context.workdir, each.context.entry is None) for each in prepared}) > 1:
        written = [write_run(each, snapshot=True) for each in prepared]
    else:
        changes = copied(prepared[0].context, RunDir(folder))
        written = [write_run(each.changed(**changes)) for each in prepared]
    return [PointRun(each.point, submission) for each, submission in zip(elements, written, strict=True)]


def execute(points: list[PointRun], folder: Path, *, limit: int | None, keep_going: bool) -> bool:
    """Run the points; return False if the user stopped the sweep."""
    if points[0].submission.route.is_queued:
        return run_in_queue(points, folder, limit=limit)
    return run_here(points, folder, keep_going=keep_going)


def preview(elements: Sequence[Element], *, as_json: bool) -> str:
    """Return the points of a sweep as text: names, nodes, ranks."""
    rows = [
        {
            "point": each.point.label,
            "name": each.point.name,
            "nodes": len(each.prepared.context.placement.nodes),
            "ranks": each.prepared.context.placement.world_size,
        }
        for each in elements
    ]
    if as_json:
        return json.dumps({"points": rows}, indent=2)
    return screen.table(("point", "name", "nodes>", "ranks>"), [list(row.values()) for row in rows])
