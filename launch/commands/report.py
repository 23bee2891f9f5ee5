"""`muster report RUN|SWEEP...`: a self-contained HTML page about runs or sweeps, viewable without a network."""

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Final

from muster.launch.sweeps.rows import configure_rows

if TYPE_CHECKING:
    from muster.jobs.runfolder.rundir import RunDir
    from muster.launch.look.history import AttemptHistory
    from muster.launch.look.report.page import ReportPage

EPILOG: Final = """\
muster report vgg11-2026                      write vgg11-2026....html into this folder
muster report sweep-vgg11 --output vgg.html   compare the points of a sweep
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = EPILOG
    configure_rows(parser)
    parser.add_argument("-o", "--output", metavar="FILE.html", type=Path, help="default: NAME.html in this folder")
    parser.add_argument(
        "--files", action="store_true", help="also write PNG, CSV and JSON files into a folder beside the page"
    )
    parser.add_argument("--force", action="store_true", help="replace the file even if it is not a report")


def run(args: argparse.Namespace) -> int:
    """Write the page.

    Raises:
        NotFoundError: if a run or sweep does not exist.
        UsageError: if `--baseline` matches no row or several, or the output file exists and is not a report.
        RunFolderError, StorageError: if the page cannot be written.
    """
    from muster.launch.cli import version
    from muster.launch.common import screen
    from muster.launch.look.predicted import read_advice
    from muster.launch.look.report.collect import About, collect
    from muster.launch.look.report.page import render
    from muster.launch.look.report.pictures import Styles
    from muster.launch.sweeps.rows import read_rows

    name = _name(args)
    output = args.output or Path(f"{name}.html")
    _check(output, force=args.force)
    title = name if len(args.targets) == 1 else f"{len(args.targets)} runs or sweeps"
    about, styles = About(title, _command(args), version()), Styles()
    told = None if args.advice is None else read_advice(args.advice)
    report = collect(about, read_rows(args), _why, styles, told)
    screen.save(str(output), render(report, styles))
    if args.files:
        _write_files(report, output.with_name(f"{output.stem}-files"), about.command)
    return 0


def _command(args: argparse.Namespace) -> str:
    """Rebuild the command line from the parsed options."""
    words = ["muster", "report", *args.targets]
    for flag in ("baseline", "skip", "skip_epochs", "advice", "runs", "output"):
        if (value := getattr(args, flag)) is not None and (flag != "skip_epochs" or value):
            words += [f"--{flag.replace('_', '-')}", str(value)]
    return shlex.join(words)


def _why(run: "RunDir") -> "tuple[AttemptHistory, str]":
    from muster.launch.commands import why

    explained = why.explain(run)
    return explained.history, why.render(explained)


def _name(args: argparse.Namespace) -> str:
    """Return the name of the only run or sweep, or "report" if there are several."""
    from muster.jobs.runfolder.rundir import find_run, runs_root
    from muster.launch.sweeps.sweep import named_sweep

    if len(args.targets) > 1:
        return "report"
    given, root = args.targets[0].partition("=")[0], runs_root(args.runs)
    folder = named_sweep(root, given)
    return folder.name if folder else find_run(root, given, unique=True).run_id


def _check(output: Path, *, force: bool) -> None:
    """Check that writing `output` would not replace a file other than a report.

    Raises:
        UsageError: if the name does not end in .html, or the file exists and is not a report.
    """
    from muster.jobs.basics.errors import UsageError
    from muster.launch.look.report.page import MARK

    if output.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"--output {output}: must be an HTML file; give a name that ends in .html")
    if force or not output.exists():
        return
    head = ""
    if output.is_file():
        with output.open("rb") as file:
            head = file.read(1 << 10).decode(errors="replace")
    if f'content="{MARK}"' not in head:
        raise UsageError(f"{output}: exists and is not a Muster report; choose another --output, or add --force")


def _write_files(report: "ReportPage", folder: Path, command: str) -> None:
    """Write the plots as PNG and CSV, the rows as CSV, and everything as JSON. Errors as for `run`."""
    import json

    from muster.jobs.basics.files import folder_error, write_bytes
    from muster.launch.common.screen import say
    from muster.launch.look.comparison_view import as_csv
    from muster.launch.look.plots.draw import save
    from muster.launch.look.report import tables

    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise folder_error(folder, error) from error
    plots = [each.plot for each in report.pictures if each.plot is not None and each.svg]
    for plot in plots:
        save(plot, folder / f"{plot.kind}.png", command)
        write_bytes(folder / f"{plot.kind}.csv", tables.as_csv(plot).encode())
    if report.rows:
        write_bytes(folder / "rows.csv", as_csv(report.rows).encode())
    record = {"rows": report.records, "plots": [plot.to_json() for plot in plots]}
    write_bytes(folder / "report.json", json.dumps(record, indent=1).encode())
    say(f"wrote {folder}/")
