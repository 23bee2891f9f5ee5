"""The display of `muster bench model` while a rank measures: a table of the rows so far, or a line for each row."""

from typing import TYPE_CHECKING

from muster.jobs.basics.words import counted
from muster.jobs.runfolder.rundir import RunDir
from muster.jobs.timing.files import FORMAT, Record, gather
from muster.jobs.timing.records import Dtypes, Header, Timed
from muster.jobs.timing.rows import rows_of
from muster.jobs.timing.table import heading, row_text, table
from muster.launch.bench.watching import View

if TYPE_CHECKING:
    from rich.console import Group


class ModelView(View):
    """The progress of a `timing:` job."""

    def __init__(self, run: RunDir) -> None:
        super().__init__(run, FORMAT)

    def forget(self) -> None:
        """Forget all records."""
        self._records: list[Record] = []

    def take(self, record: Record) -> None:
        """Process one record."""
        self._records.append(record)

    def line_of(self, record: Record) -> str | None:
        """Return a line of text for the start and for each finished row; None for other records."""
        if isinstance(record, Header):
            machine = record.machine
            return f"timing {counted(len(record.settings.cases()), 'row')} on {machine.gpu or machine.cpu}"
        if isinstance(record, Timed):
            found = gather(self._records)
            return None if found and record.case in (case for _, case in found.timings[0].left) else row_text(record)
        return f"types of {record.model} in {record.precision}" if isinstance(record, Dtypes) else None

    def table(self, width: int) -> "Group | None":
        """Return the rows so far, and the row being measured."""
        from rich.console import Group
        from rich.text import Text

        found = gather(self._records)
        if found is None:
            return None
        (timing,) = found.timings
        lines = [*heading(timing.header), *(table(rows_of(timing)) if timing.rows else [])]
        if timing.left:
            launch, now = timing.left[0]
            under_way = f"{now.name}, launch {launch + 1}"
            settings, left = timing.header.settings, len(timing.left)
            rows = len(settings.cases())
            lines.append(f"# now {under_way} of {settings.launches}, {rows - left} of {rows} rows done")
        return Group(*(Text(line, no_wrap=True, overflow="ellipsis") for line in lines))
