"""Readable output: times, durations, tables that never wrap or cut a value, and files that commands write."""

import sys
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TextIO

from muster.jobs.basics.terminal import printable, raw, terminal_columns

if TYPE_CHECKING:
    from rich.console import Console

WIDE: Final = 100_000
STYLES: Final = {
    "starting": "yellow",
    "running": "green",
    "restarting": "yellow",
    "stopping": "yellow",
    "done": "green",
    "failed": "red",
    "victim": "yellow",
    "lost": "red",
}


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, spare: Sequence[str] = ()) -> str:
    """Render rows under headings. A column whose name ends in `>` is right-aligned; None is shown as `-`.

    On a terminal, the table is coloured. If the terminal is too narrow, `spare` columns are omitted in the given order,
    and the last line names them.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    cells = [["-" if value is None else str(value) for value in row] for row in rows]
    by_column = [(name, list(texts)) for name, *texts in zip(columns, *cells, strict=True)]
    missing = []
    for name in spare:
        wide = sum(max(map(len, [head.rstrip(">"), *texts])) + 2 for head, texts in by_column) - 2
        if wide > terminal_columns() and name in columns:
            by_column = [each for each in by_column if each[0] != name]
            missing.append(name.rstrip(">"))
    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column, _ in by_column:
        grid.add_column(
            Text(printable(column.rstrip(">"))), justify="right" if column.endswith(">") else "left", no_wrap=True
        )
    for texts in zip(*(texts for _, texts in by_column), strict=True):
        grid.add_row(*(Text(printable(text), style=STYLES.get(text.rstrip("?"), "")) for text in texts))
    console = Console(file=sys.stdout, width=WIDE)
    with console.capture() as capture:
        console.print(grid)
    lines = [line.rstrip() for line in capture.get().splitlines()]
    return "\n".join([*lines, f"too narrow for: {', '.join(missing)}"] if missing else lines)


def live(stream: TextIO | None = None) -> "Console":
    """Return a rich console that may move the cursor, on `stream` (default: standard error), for live displays."""
    from rich.console import Console
    from rich.segment import Segment
    from rich.style import Style

    class Live(Console):
        """A console that removes control characters, links and hidden text. Only rich itself can move the cursor."""

        def render(self, *args: Any, **options: Any) -> Iterable[Segment]:
            for each in super().render(*args, **options):
                style = each.style
                if style and (style.link or style.conceal):
                    style = style.update_link(None) + Style(conceal=False)
                yield each if each.control else Segment(printable(each.text), style)

    return Live(file=raw(sys.stderr if stream is None else stream))


def save(file: str, text: str) -> None:
    """Write text to a file, and report this on standard error.

    Raises:
        RunFolderError: if the file cannot be written.
    """
    from muster.jobs.basics.errors import RunFolderError

    try:
        Path(file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise RunFolderError(f"{file}: cannot be written: {(error.strerror or 'unknown reason').lower()}") from error
    say(f"wrote {file}")


def say(text: str) -> None:
    """Print one message on standard error, because standard output is for data."""
    print(f"muster: {text}", file=sys.stderr, flush=True)


def clock(unix_s: float | None) -> str:
    """Format a time in UTC, so that it reads the same on every host."""
    if unix_s is None:
        return "-"
    return f"{datetime.fromtimestamp(unix_s, timezone.utc):%Y-%m-%d %H:%M:%S} UTC"


def duration(seconds: float | None) -> str:
    """Format a duration with at most two units: 4.2 s, 3 min 07 s, 2 h 05 min."""
    if seconds is None:
        return "-"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def size(nbytes: float | None) -> str:
    """Format a number of bytes in steps of 1024, as du -h does: 812 B, 3.4 KB, 27 MB, 1.2 GB."""
    if nbytes is None:
        return "-"
    units = iter(("B", "KB", "MB", "GB", "TB"))
    unit = next(units)
    while nbytes >= 1000 and unit != "TB":
        nbytes, unit = nbytes / 1024, next(units)
    return f"{nbytes:.1f} {unit}" if nbytes < 9.95 and unit != "B" else f"{nbytes:.0f} {unit}"
