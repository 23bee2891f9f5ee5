"""A result and all that is made of it: the report on standard output, files, plots, rows to compare."""

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
class Report:
    """What was measured, and all that is made of it."""

    whole: BaseModel
    lines: Callable[[], list[str]]
    rows: "Callable[[], Sequence[MeasuredRow]]"  # runs of one world or model joined
    missing: str  # what was requested but not measured; empty if nothing is missing
    is_bad: bool
    write: Write
    write_rows: Write | None  # None: there are no rows
    draw: Write

    def show(self, *, as_json: bool) -> int:
        """Print it on standard output, as text or JSON; return 1 for a bad result."""
        print(self.whole.model_dump_json(indent=1) if as_json else "\n".join(self.lines()))
        return int(self.is_bad)

    def deliver(self, output: Output) -> int:
        """Write `--out`, show it, and draw `--plot`; return 1 for a bad result.

        Raises:
            RunFolderError, StorageError: a file cannot be written; the runs keep what was measured.
            UsageError: as `plot`.
        """
        try:  # the file first: a reader that goes away (| head) ends us; and the report whatever becomes of the file
            if output.out is not None:
                self._save(Path(output.out))
        finally:
            code = self.show(as_json=output.json)
        if output.plot is not None:
            self.plot(Path(output.plot))
        return code

    def plot(self, path: Path, *, flag: str = "--plot") -> None:
        """Draw it into the file that an option names.

        Raises:
            UsageError: there is nothing to draw.
            RunFolderError, StorageError: it cannot be written.
        """
        from muster.jobs.measuring.figures import NothingToPlotError

        try:
            with naming(flag):
                self.draw(path)
        except NothingToPlotError as error:
            raise UsageError(f"{flag} {path}: {error}") from error
        say(f"wrote {path}")

    def _save(self, path: Path) -> None:
        with naming("--out"):
            for write, file in ((self.write, path), (self.write_rows, path.with_suffix(".csv"))):
                if write is not None:
                    write(file)
                    say(f"wrote {file}")


def of_models(timings: "Timings") -> Report:
    """Return the report of timings."""
    from muster.jobs.timing import files, plots, table
    from muster.jobs.timing.rows import joined_rows

    return Report(
        timings,
        partial(table.report_lines, timings),
        partial(joined_rows, timings),
        timings.missing,
        table.verdict(timings) != "OK",
        partial(files.write_timings, timings),
        partial(files.write_csv, timings) if any(timing.rows for timing in timings.timings) else None,
        partial(plots.plot, timings),
    )


def of_collectives(result: "Result", unmeasured: Sequence[str] = ()) -> Report:
    """Return the report of collectives; `unmeasured` names the worlds of a grid of which there is nothing."""
    from muster.collectives_bench.results import files, plots
    from muster.collectives_bench.results.missing import missing
    from muster.collectives_bench.results.report import is_failed, report_lines
    from muster.collectives_bench.results.rows import rows_of

    rows = rows_of(result)
    return Report(
        result,
        partial(report_lines, result, unmeasured),
        lambda: rows,
        missing(result).text,
        is_failed(result, rows, unmeasured),
        partial(files.write_result, result),
        partial(files.write_csv, rows) if rows else None,
        partial(plots.plot, rows),
    )


@contextmanager
def naming(flag: str) -> Iterator[None]:
    """Say of a file that cannot be written which option named it: `--runs` would not help."""
    try:
        yield
    except (RunFolderError, StorageError) as error:
        found = str(error).partition(";")[0]
        raise type(error)(f"{flag}: {found}; choose another place, for the runs keep what was measured") from error


def say(text: str) -> None:
    """Say one thing of ours, beside the data on standard output."""
    print(text, file=sys.stderr, flush=True)
