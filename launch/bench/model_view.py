"""What `muster bench model` shows while a rank times: the rows so far, or a plain line for each."""

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
            header = next(each for each in self._records if isinstance(each, Header))
            is_whole = record.state != "ok" or len(record.launches) >= header.settings.launches
            return row_text(record) if is_whole else None
        return f"types of {record.model} in {record.precision}" if isinstance(record, Dtypes) else None

    def table(self, width: int) -> "Group | None":
        """Return the rows so far, and which is under way."""
        from rich.console import Group
        from rich.text import Text

        found = gather(self._records)
        if found is None:
            return None
        (timing,) = found.timings
        failed = {row.case for row in timing.rows if row.state != "ok"}
        settings, done = timing.header.settings, {row.case: len(row.launches) for row in timing.rows}
        lines = [*heading(timing.header), *(table(rows_of(timing)) if timing.rows else [])]
        left = [case for case in settings.cases() if done.get(case, 0) < settings.launches]
        left = [case for case in left if case not in failed]
        if left:
            now = min(left, key=lambda case: done.get(case, 0))  # of equals the first, as the ranks measure
            whole = len(settings.cases()) - len(left)
            under_way = f"{now.model} {now.pass_name} {now.precision}, launch {done.get(now, 0) + 1}"
            lines.append(f"# now {under_way} of {settings.launches}; {whole} of {len(settings.cases())} done")
        return Group(*(Text(line, no_wrap=True, overflow="ellipsis") for line in lines))
