"""After the measuring: the report on standard output, and the files that were asked for."""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel

from muster.jobs.basics.errors import RunFolderError, StorageError, UsageError

if TYPE_CHECKING:
    from muster.collectives_bench.records import Result
    from muster.collectives_bench.results.rows import Row

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

    def deliver(self, args: argparse.Namespace) -> int:
        """Write `--out`, and show it; return 1 for a bad result.

        Raises:
            RunFolderError, StorageError: a file cannot be written; the runs keep what was measured.
        """
        try:  # the file first: a reader that goes away (| head) ends us; and the report whatever becomes of the file
            if args.out is not None:
                self._save(Path(args.out))
        finally:
            code = self.show(as_json=args.json)
        return code

    def _save(self, path: Path) -> None:
        with naming("--out"):
            for write, file in ((self.write, path), (self.write_rows, path.with_suffix(".csv"))):
                if write is not None:
                    write(file)
                    say(f"wrote {file}")


def of_collectives(result: "Result", unmeasured: Sequence[str] = ()) -> Report:
    """Return the report of collectives; `unmeasured` names the worlds of a grid of which there is nothing."""
    from muster.collectives_bench.results.files import write_csv, write_result
    from muster.collectives_bench.results.report import is_failed, report_lines
    from muster.collectives_bench.results.rows import rows_of

    rows = rows_of(result)
    return Report(
        result,
        partial(report_lines, result, unmeasured),
        is_failed(result, rows, unmeasured),
        partial(write_result, result),
        partial(write_csv, rows) if rows else None,
    )


@contextmanager
def naming(flag: str) -> Iterator[None]:
    """Say of a file that cannot be written which option named it: `--runs` would not help."""
    try:
        yield
    except (RunFolderError, StorageError) as error:
        found = str(error).partition(";")[0]
        raise type(error)(f"{flag}: {found}; choose another place, for the runs keep what was measured") from error


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
