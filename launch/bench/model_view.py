"""What `muster bench model` shows while a rank times: the rows so far, or a plain line for each."""

from typing import TYPE_CHECKING

from muster.jobs.basics.words import counted
from muster.jobs.runfolder.rundir import RunDir
from muster.jobs.timing.files import FORMAT, Record, gather
from muster.jobs.timing.records import Dtypes, Header, Timed
from muster.jobs.timing.table import heading, row_text, table
from muster.launch.bench.watching import View

if TYPE_CHECKING:
    from rich.console import Group


class ModelView(View):
    """A run of a `timing:` job."""

    def __init__(self, run: RunDir) -> None:
        super().__init__(run, FORMAT)

    def forget(self) -> None:
        """Begin without records."""
        self._records: list[Record] = []

    def take(self, record: Record) -> None:
        """Take in a record."""
        self._records.append(record)

    def line_of(self, record: Record) -> str | None:
        """Return the plain line that a record is worth: what begins, and each row."""
        if isinstance(record, Header):
            machine = record.machine
            return f"timing {counted(len(record.settings.cases()), 'row')} on {machine.gpu or machine.cpu}"
        if isinstance(record, Timed):
            return row_text(record)
        return f"types of {record.model} in {record.precision}" if isinstance(record, Dtypes) else None

    def table(self, width: int) -> "Group | None":
        """Return the rows so far, and which is under way."""
        from rich.console import Group
        from rich.text import Text

        found = gather(self._records)
        if found is None:
            return None
        (timing,) = found.timings
        cases, done = timing.header.settings.cases(), len(timing.rows)
        lines = [*heading(timing.header), *(table(timing.rows) if timing.rows else [])]
        if done < len(cases):
            under_way = f"{cases[done].model} {cases[done].pass_name} {cases[done].precision}"
            lines.append(f"# now {under_way}, {done} of {len(cases)} done")
        return Group(*(Text(line, no_wrap=True, overflow="ellipsis") for line in lines))
