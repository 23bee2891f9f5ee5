"""Tables of measured rows: a header with names and units after `#`, fixed columns, and UTC times."""

from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from typing import Any, Final

# (name, unit, width, value); a value that is wider than its column is not cut and shifts the rest of its row
Column = tuple[str, str, int, Callable[[Any], str]]

SPREAD: Final[Column] = ("+-", "(%)", 6, lambda row: "-" if row.spread is None else f"{row.spread:.1f}")


def headings(columns: Sequence[Column], last: str, unit: str = "") -> list[str]:
    """Return the header lines: names and units of columns; `last` is the name of a final column of text."""
    rows = ([column[place] for column in columns] for place in (0, 1))
    lines = ("".join(f" {word}".rjust(column[2]) for word, column in zip(row, columns, strict=True)) for row in rows)
    return [f"#{line[1:]}  {end}".rstrip() for line, end in zip(lines, (last, unit), strict=True)]


def cells(columns: Sequence[Column], row: Any) -> str:
    """Return the values of a row, padded to the widths of the columns."""
    return "".join(f" {value(row)}".rjust(width) for _, _, width, value in columns)


def utc(time: float) -> str:
    """Format unix seconds as a date and a time of day."""
    return f"{datetime.fromtimestamp(time, timezone.utc):%Y-%m-%d %H:%M:%S} UTC"
