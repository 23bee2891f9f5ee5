"""Selection of the rows for `muster compare`, `plot` and `report`: named runs, grouped, without warm-up steps."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from muster.launch.common.options import add_runs, whole

if TYPE_CHECKING:
    from muster.jobs.basics.errors import MusterError
    from muster.jobs.runfolder.rundir import RunDir
    from muster.launch.look.comparison import RunRow
    from muster.launch.look.steps import Measured


@dataclass(frozen=True)
class ChosenRows:
    """Rows chosen on a command line. The mappings are keyed by row label; `whole` includes the warm-up."""

    rows: "list[RunRow]"
    groups: "dict[str, list[Measured]]"
    folders: "dict[str, list[RunDir]]"
    whole: "dict[str, list[Measured]]"
    runs: "list[RunDir]"  # all runs, including those without steps
    missing: "list[MusterError]"  # one error per run without usable steps


def configure_rows(parser: argparse.ArgumentParser) -> None:
    """Declare the options that choose rows."""
    parser.add_argument("targets", metavar="RUN|SWEEP", nargs="+", help="a run or a sweep, or part of its name")
    parser.add_argument(
        "--baseline", metavar="ROW", help="part of the name of the row to compare with (default: the first)"
    )
    skip = parser.add_mutually_exclusive_group()
    skip.add_argument(
        "--skip",
        metavar="N",
        type=whole("--skip", least=0),
        help="number of warm-up steps to skip (default: the first steps that are slow)",
    )
    skip.add_argument(
        "--skip-epochs", metavar="N", type=whole("--skip-epochs", least=0), default=0, help="number of epochs to skip"
    )
    parser.add_argument(
        "--advice", metavar="FILE.json", type=Path, help="show the prediction of muster advise -o beside the steps"
    )
    add_runs(parser)


def chosen_rows(args: argparse.Namespace) -> ChosenRows:
    """Read and compare the runs named on the command line, and print which of them have no steps.

    Raises:
        NotFoundError: if a run or sweep does not exist, or if no run has steps.
        UsageError: if `--baseline` matches no row, or several.
    """
    from muster.jobs.basics.errors import NotFoundError
    from muster.launch.common.screen import say

    chosen = read_rows(args)
    if not chosen.rows:
        nothing = NotFoundError(f"{', '.join(args.targets)}: none of these runs has begun; name one that has")
        raise chosen.missing[0] if chosen.missing else nothing
    for each in chosen.missing:
        say(f"left out: {each}")
    return chosen


def read_rows(args: argparse.Namespace) -> ChosenRows:
    """Read and compare the runs that have steps; list the others in `missing`. Errors as for `chosen_rows`."""
    from muster.jobs.basics.errors import MusterError
    from muster.jobs.runfolder.rundir import runs_root
    from muster.launch.look.comparison import compared
    from muster.launch.look.steps import read_whole

    found = ChosenRows([], {}, {}, {}, [], [])
    for label, runs in rows_of(args.targets, runs_root(args.runs)).items():
        for run in runs:
            found.runs.append(run)
            try:
                whole = read_whole(run)
                measured = whole.without_warm_up(skip=args.skip, skip_epochs=args.skip_epochs)
            except MusterError as error:  # one unusable run does not hide the others
                found.missing.append(error)
                continue
            found.whole.setdefault(label, []).append(whole)
            found.groups.setdefault(label, []).append(measured)
            found.folders.setdefault(label, []).append(run)
    if found.groups:
        found.rows.extend(compared(found.groups, baseline_of(list(found.groups), args.baseline)))
    return found


def rows_of(targets: Sequence[str], root: Path) -> "dict[str, list[RunDir]]":
    """Return the runs of each row by its label. A row is a single run, or a point of a sweep with its repeats."""
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
            if run.events.exists():
                found.setdefault(f"{prefix}{point.label}".strip() or record.name, []).append(run)
    return found


def baseline_of(labels: Sequence[str], asked: str | None) -> str:
    """Return the label of the baseline row: the row that `asked` matches, or the first row.

    Raises:
        UsageError: if `asked` matches no row, or several.
    """
    from muster.jobs.basics.errors import UsageError

    if asked is None:
        return labels[0]
    fitting = [label for label in labels if label == asked] or [label for label in labels if asked in label]
    if len(fitting) != 1:
        what = f"matches {len(fitting)} rows" if fitting else "matches no row"
        raise UsageError(f"--baseline {asked}: {what}; the rows are {', '.join(labels)}")
    return fitting[0]
