"""After the measuring: the report on standard output, and the files that were asked for."""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from muster.jobs.basics.errors import RunFolderError, StorageError, UsageError
from muster.jobs.runfolder.rundir import RunDir

if TYPE_CHECKING:
    from muster.collectives_bench.records import Result
    from muster.collectives_bench.results.rows import Row


def deliver(runs: Sequence[RunDir], args: argparse.Namespace, unmeasured: Sequence[str] = ()) -> int:
    """Show what runs have measured, as text or JSON, and write `--out` and `--plot`; return 1 for a bad result.

    `unmeasured` names the worlds of the grid of which there is nothing.

    Raises:
        RunFolderError, StorageError: a file cannot be written; the runs keep what was measured.
    """
    from muster.collectives_bench.results.files import read_result, write_csv, write_result
    from muster.collectives_bench.results.report import is_failed
    from muster.collectives_bench.results.rows import rows_of

    result = read_result([run.path for run in runs])
    rows = rows_of(result)
    try:  # the file first: a reader that goes away (| head) ends us; and the report whatever becomes of the file
        if args.out is not None:
            of_csv = partial(write_csv, rows) if rows else None
            save(Path(args.out), partial(write_result, result), of_csv)
    finally:
        show(result, as_json=args.json, unmeasured=unmeasured)
    if args.plot is not None:
        plot(rows, Path(args.plot))
    return int(is_failed(result, rows, unmeasured))


@contextmanager
def naming(flag: str) -> Iterator[None]:
    """Say of a file that cannot be written which option named it: `--runs` would not help."""
    try:
        yield
    except (RunFolderError, StorageError) as error:
        found = str(error).partition(";")[0]
        raise type(error)(f"{flag}: {found}; choose another place, for the runs keep what was measured") from error


def show(result: "Result", *, as_json: bool, unmeasured: Sequence[str] = ()) -> None:
    """Print a result on standard output: the report, or its records."""
    if as_json:
        if unmeasured:
            say(f"muster: not measured: {'; '.join(unmeasured)}")
        print(result.model_dump_json(indent=1))
        return
    from muster.collectives_bench.results.report import report_lines

    print("\n".join(report_lines(result, unmeasured)))


def save(path: Path, as_json: Callable[[Path], None], as_csv: Callable[[Path], None] | None) -> None:
    """Write what `--out` asks for: a result as JSON, and its rows, if there are any, beside it; errors as `deliver`."""
    with naming("--out"):
        for write, file in ((as_json, path), (as_csv, path.with_suffix(".csv"))):
            if write is not None:
                write(file)
                say(f"wrote {file}")


def plot(rows: "Sequence[Row]", path: Path, *, flag: str = "--plot") -> None:
    """Draw rows into the file that an option names.

    Raises:
        UsageError: there is nothing to draw.
        RunFolderError, StorageError: it cannot be written.
    """
    from muster.collectives_bench.results import plots

    try:
        with naming(flag):
            plots.plot(rows, path)
    except plots.NothingToPlotError as error:
        raise UsageError(f"{flag} {path}: {error}") from error
    say(f"wrote {path}")


def say(text: str) -> None:
    """Say one thing of ours, beside the data on standard output."""
    print(text, file=sys.stderr, flush=True)
