"""The outputs of a result: the report on standard output, files, plots, and rows for comparison."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel

from muster.jobs.basics.errors import RunFolderError, StorageError, UsageError
from muster.launch.bench.choices import Output

if TYPE_CHECKING:
    from muster.collectives_bench.records import Result
    from muster.jobs.measuring.launches import MeasuredRow
    from muster.jobs.timing.records import Timings

Write = Callable[[Path], None]


@dataclass(frozen=True)
class BenchReport:
    """One result, with functions that print, write and plot it."""

    whole: BaseModel
    lines: Callable[[], list[str]]
    rows: "Callable[[], Sequence[MeasuredRow]]"  # runs of the same world or model are merged
    missing: str  # requested but unmeasured parts; empty if there are none
    is_bad: bool
    write: Write
    write_rows: Write | None  # None if there are no rows
    draw: Write
    draw_over_ranks: Write | None = None  # None for models, which are timed on one rank

    def show(self, *, as_json: bool) -> int:
        """Print the report, as text or JSON; return 1 for a bad result."""
        print(self.whole.model_dump_json(indent=1) if as_json else "\n".join(self.lines()))
        return int(self.is_bad)

    def deliver(self, output: Output) -> int:
        """Write `--out`, print the report, and draw `--plot`; return 1 for a bad result.

        Raises:
            RunFolderError, StorageError: if a file cannot be written; the runs keep the measurements.
            UsageError: as for `plot`.
        """
        try:  # write the file first: printing to a closed pipe (| head) ends this process; print even if writing fails
            if output.out is not None:
                self._save(Path(output.out))
        finally:
            code = self.show(as_json=output.json)
        if output.plot is not None:
            self.plot(Path(output.plot))
        return code

    def plot(self, path: Path, *, flag: str = "--plot", over_ranks: bool = False) -> None:
        """Draw the plot into a file; `flag` is the option that named it. `over_ranks`: plot against ranks.

        Raises:
            UsageError: if there is nothing to draw.
            RunFolderError, StorageError: if the file cannot be written.
        """
        from muster.jobs.measuring.figures import NothingToPlotError

        draw = self.draw_over_ranks if over_ranks else self.draw
        if draw is None:
            raise UsageError("--over ranks: is for collectives; a model alone runs on one rank")
        try:
            with naming(flag):
                draw(path)
        except NothingToPlotError as error:
            raise UsageError(f"{flag} {path}: {error}") from error
        say(f"wrote {path}")

    def _save(self, path: Path) -> None:
        with naming("--out"):
            for write, file in ((self.write, path), (self.write_rows, path.with_suffix(".csv"))):
                if write is not None:
                    write(file)
                    say(f"wrote {file}")


def of_models(timings: "Timings") -> BenchReport:
    """Return the report of model timings."""
    from muster.jobs.timing import files, plots, table
    from muster.jobs.timing.rows import joined_rows

    return BenchReport(
        timings,
        partial(table.report_lines, timings),
        partial(joined_rows, timings),
        timings.missing,
        table.verdict(timings) != "OK",
        partial(files.write_timings, timings),
        partial(files.write_csv, timings) if any(timing.rows for timing in timings.timings) else None,
        partial(plots.plot, timings),
    )


def of_collectives(result: "Result", unmeasured: Sequence[str] = ()) -> BenchReport:
    """Return the report of collectives. `unmeasured` lists the worlds of the grid without any measurement."""
    from muster.collectives_bench.results import files, plots
    from muster.collectives_bench.results.missing import missing
    from muster.collectives_bench.results.report import is_failed, report_lines
    from muster.collectives_bench.results.rows import rows_of

    rows = rows_of(result)
    return BenchReport(
        result,
        partial(report_lines, result, unmeasured),
        lambda: rows,
        missing(result).text,
        is_failed(result, rows, unmeasured),
        partial(files.write_result, result),
        partial(files.write_csv, rows) if rows else None,
        partial(plots.plot, rows),
        partial(plots.plot, rows, axis_name="ranks"),
    )


@contextmanager
def naming(flag: str) -> Iterator[None]:
    """Name the option `flag` in errors about an unwritable file, instead of the usual advice to change `--runs`."""
    try:
        yield
    except (RunFolderError, StorageError) as error:
        found = str(error).partition(";")[0]
        raise type(error)(
            f"{flag}: {found}; choose another file (the run folders still have the measurements)"
        ) from error


def say(text: str) -> None:
    """Print one message on standard error, apart from the data on standard output."""
    print(text, file=sys.stderr, flush=True)
