"""`muster compare RUN|SWEEP...`: where the time of a step went in several runs, and which of them is faster."""

import argparse
import json
from typing import TYPE_CHECKING

from muster.launch.common import options
from muster.launch.common.options import whole

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from muster.jobs.runfolder.rundir import RunDir
    from muster.launch.look.steps import Measured

EPILOG = """\
muster compare bucketed-2026 zero1-2026=ours      two runs; a word behind = names a row
muster compare sweep-vgg11 --baseline mode=ddp    the points of a sweep against one of them
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("targets", metavar="RUN|SWEEP", nargs="+", help="a run or a sweep, or part of its name")
    parser.add_argument("--baseline", metavar="ROW", help="part of the name of the row to compare with (the first)")
    skip = parser.add_mutually_exclusive_group()
    skip.add_argument(
        "--skip", metavar="N", type=whole("--skip", least=0), help="steps that are warm-up (default: the slow ones)"
    )
    skip.add_argument(
        "--skip-epochs", metavar="N", type=whole("--skip-epochs", least=0), default=0, help="or epochs that are"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--csv", action="store_true", help="print the rows as CSV")
    form.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    options.add_json(form)
    options.add_runs(parser)


def run(args: argparse.Namespace) -> int:
    """Print the comparison.

    Raises:
        NotFoundError: there is no such run or sweep, or a run has no steps.
        UsageError: `--baseline` names no row, or several.
    """
    from muster.jobs.runfolder.rundir import runs_root
    from muster.launch.look import comparison, comparison_view
    from muster.launch.look.steps import read_measured

    groups: dict[str, list[Measured]] = {}
    for label, folders in rows_of(args.targets, runs_root(args.runs)).items():
        groups[label] = [read_measured(each, skip=args.skip, skip_epochs=args.skip_epochs) for each in folders]
    rows = comparison.compared(groups, baseline_of(list(groups), args.baseline))
    if args.json:
        print(json.dumps({"rows": [row.record() for row in rows]}, indent=1))
    elif args.csv:
        print(comparison_view.as_csv(rows), end="")
    elif args.markdown:
        print(comparison_view.as_markdown(rows), end="")
    else:
        print(comparison_view.table(rows))
    return 0


def rows_of(targets: "Sequence[str]", root: "Path") -> "dict[str, list[RunDir]]":
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


def baseline_of(labels: "Sequence[str]", asked: str | None) -> str:
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
