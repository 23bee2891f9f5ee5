"""The rows of compare, plot and report: the runs that a command line names, grouped, without their warm-up."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from muster.launch.common.options import add_runs, whole

if TYPE_CHECKING:
    from muster.jobs.basics.errors import MusterError
    from muster.jobs.runfolder.rundir import RunDir
    from muster.launch.look.comparison import Row
    from muster.launch.look.steps import Measured


@dataclass(frozen=True)
class Chosen:
    """The rows, the runs of each by its label, and their folders; `whole` has the warm-up, too."""

    rows: "list[Row]"
    groups: "dict[str, list[Measured]]"
    folders: "dict[str, list[RunDir]]"
    whole: "dict[str, list[Measured]]"
    runs: "list[RunDir]"  # with those that have no steps
    missing: "list[MusterError]"  # why these have none


def configure_rows(parser: argparse.ArgumentParser) -> None:
    """Declare the options that choose rows."""
    parser.add_argument("targets", metavar="RUN|SWEEP", nargs="+", help="a run or a sweep, or part of its name")
    parser.add_argument("--baseline", metavar="ROW", help="part of the name of the row to compare with (the first)")
    skip = parser.add_mutually_exclusive_group()
    skip.add_argument(
        "--skip", metavar="N", type=whole("--skip", least=0), help="steps that are warm-up (default: the slow ones)"
    )
    skip.add_argument(
        "--skip-epochs", metavar="N", type=whole("--skip-epochs", least=0), default=0, help="or epochs that are"
    )
    add_runs(parser)


def chosen_rows(args: argparse.Namespace) -> Chosen:
    """Read and compare the runs that a command line names; say which have no steps.

    Raises:
        NotFoundError: there is no such run or sweep, or no run has steps.
        UsageError: `--baseline` names no row, or several.
    """
    from muster.jobs.basics.errors import NotFoundError
    from muster.launch.common.screen import say

    chosen = read_rows(args)
    if not chosen.rows:
        nothing = NotFoundError(f"{', '.join(args.targets)}: no run of it has begun")
        raise chosen.missing[0] if chosen.missing else nothing
    for each in chosen.missing:
        say(f"left out: {each}")
    return chosen


def read_rows(args: argparse.Namespace) -> Chosen:
    """Read and compare the runs that a command line names, as far as they have steps; errors as `chosen_rows`."""
    from muster.jobs.basics.errors import MusterError
    from muster.jobs.runfolder.rundir import runs_root
    from muster.launch.look.comparison import compared
    from muster.launch.look.steps import read_whole

    found = Chosen([], {}, {}, {}, [], [])
    for label, runs in rows_of(args.targets, runs_root(args.runs)).items():
        for run in runs:
            found.runs.append(run)
            try:
                whole = read_whole(run)
                measured = whole.without_warm_up(skip=args.skip, skip_epochs=args.skip_epochs)
            except MusterError as error:  # one run without steps, or not to be trusted, does not hide the others
                found.missing.append(error)
                continue
            found.whole.setdefault(label, []).append(whole)
            found.groups.setdefault(label, []).append(measured)
            found.folders.setdefault(label, []).append(run)
    if found.groups:
        found.rows.extend(compared(found.groups, baseline_of(list(found.groups), args.baseline)))
    return found


def rows_of(targets: Sequence[str], root: Path) -> "dict[str, list[RunDir]]":
    """Return the runs of each row: a point of a sweep with its repeats, or a run by itself."""
    from muster.jobs.runfolder.rundir import find_run
    from muster.launch.sweeps.sweep import SweepRecord, named_sweep

    found: dict[str, list[RunDir]] = {}
    for target in targets:
        given, _, name = target.partition("=")
        if (folder := named_sweep(root, given)) is None:
            run = find_run(root, given, unique=True)
            found.setdefault(name or run.run_id, []).append(run)
            continue
        record = SweepRecord.read(folder)
        prefix = f"{name} " if name else f"{folder.name} " if len(targets) > 1 else ""
        for point, run in zip(record.points, record.runs(folder), strict=True):
            if run.path.is_dir():
                found.setdefault(f"{prefix}{point.label}".strip() or record.name, []).append(run)
    return found


def baseline_of(labels: Sequence[str], asked: str | None) -> str:
    """Return the label of the row to compare with: the one that is asked for, or the first.

    Raises:
        UsageError: no row has such a name, or several have.
    """
    from muster.jobs.basics.errors import UsageError

    if asked is None:
        return labels[0]
    fitting = [label for label in labels if label == asked] or [label for label in labels if asked in label]
    if len(fitting) != 1:
        what = f"fits {len(fitting)} rows" if fitting else "fits no row"
        raise UsageError(f"--baseline {asked}: {what}; the rows are {', '.join(labels)}")
    return fitting[0]
