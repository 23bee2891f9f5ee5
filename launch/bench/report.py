"""After the measuring: the report on standard output, and the files that were asked for."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel

from muster.jobs.basics.errors import RunFolderError, StorageError, UsageError
from muster.jobs.measuring.figures import NothingToPlotError
from muster.jobs.timing.files import write_csv, write_timings
from muster.jobs.timing.records import Timings
from muster.jobs.timing.table import report_lines, verdict
from muster.launch.bench.choices import Output

if TYPE_CHECKING:
    from muster.collectives_bench.records import Result

Write = Callable[[Path], None]


@dataclass(frozen=True)
class Report:
    """What was measured, and all that is made of it."""

    whole: BaseModel
    lines: Callable[[], list[str]]
    is_bad: bool
    write: Write
    write_rows: Write | None  # None: there are no rows

    def show(self, *, as_json: bool) -> int:
        """Print it on standard output, as text or JSON; return 1 for a bad result."""
        print(self.whole.model_dump_json(indent=1) if as_json else "\n".join(self.lines()))
        return int(self.is_bad)

    def deliver(self, output: Output) -> int:
        """Write `--out`, and show it; return 1 for a bad result.

        Raises:
            RunFolderError, StorageError: a file cannot be written; the runs keep what was measured.
        """
        try:  # the file first: a reader that goes away (| head) ends us; and the report whatever becomes of the file
            if output.out is not None:
                self._save(Path(output.out))
        finally:
            code = self.show(as_json=output.json)
        return code

    def _save(self, path: Path) -> None:
        with naming("--out"):
            for write, file in ((self.write, path), (self.write_rows, path.with_suffix(".csv"))):
                if write is not None:
                    write(file)
                    say(f"wrote {file}")


def of(whole: "Result | Timings", unmeasured: Sequence[str] = ()) -> Report:
    """Return the report of a result; `unmeasured` names the worlds of a grid of which there is nothing."""
    return of_models(whole) if isinstance(whole, Timings) else of_collectives(whole, unmeasured)


def of_models(timings: Timings) -> Report:
    """Return the report of timings."""
    of_csv = partial(write_csv, timings) if any(timing.rows for timing in timings.timings) else None
    is_bad = verdict(timings) != "OK"
    return Report(timings, partial(report_lines, timings), is_bad, partial(write_timings, timings), of_csv)


def of_collectives(result: "Result", unmeasured: Sequence[str] = ()) -> Report:
    """Return the report of collectives."""
    from muster.collectives_bench.results import files
    from muster.collectives_bench.results import report as of_result
    from muster.collectives_bench.results.rows import rows_of

    rows = rows_of(result)
    return Report(
        result,
        partial(of_result.report_lines, result, unmeasured),
        of_result.is_failed(result, rows, unmeasured),
        partial(files.write_result, result),
        partial(files.write_csv, rows) if rows else None,
    )


@contextmanager
def naming(flag: str) -> Iterator[None]:
    """Say of a file that cannot be written which option named it: `--runs` would not help."""
    try:
        yield
    except (RunFolderError, StorageError) as error:
        found = str(error).partition(";")[0]
        raise type(error)(f"{flag}: {found}; choose another place, for the runs keep what was measured") from error


def plot(whole: "Result | Timings", path: Path, *, flag: str = "--plot") -> None:
    """Draw a result into the file that an option names.

    Raises:
        UsageError: there is nothing to draw.
        RunFolderError, StorageError: it cannot be written.
    """
    from muster.collectives_bench.results.plots import plot as plot_collectives
    from muster.collectives_bench.results.rows import rows_of
    from muster.jobs.timing.plots import plot as plot_models

    try:
        with naming(flag):
            plot_models(whole, path) if isinstance(whole, Timings) else plot_collectives(rows_of(whole), path)
    except NothingToPlotError as error:
        raise UsageError(f"{flag} {path}: {error}") from error
    say(f"wrote {path}")


def say(text: str) -> None:
    """Say one thing of ours, beside the data on standard output."""
    print(text, file=sys.stderr, flush=True)
