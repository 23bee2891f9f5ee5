"""Drawings of a pipeline's step, for the commands that make them: on the terminal, and in files."""

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from muster.jobs.basics.errors import RunFolderError
from muster.pipe.schedules.draw import Rows, legend, text


def on_screen(rows: Rows, *, wide: int, names: Sequence[str] = ()) -> str:
    """Draw rows as wide as the terminal, or `wide` columns where the output is none, with what its letters mean."""
    terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size((wide, 24)).columns if terminal else wide
    drawn = text(rows, width=width, names=names, colour=terminal and "NO_COLOR" not in os.environ)
    return f"{drawn}\n\n{legend(rows)}"


def write(file: str, svg: str) -> None:
    """Write a drawing, and say so.

    Raises:
        RunFolderError: it cannot be written.
    """
    try:
        Path(file).write_text(svg, encoding="utf-8")
    except OSError as error:
        raise RunFolderError(f"{file}: cannot be written: {(error.strerror or 'unknown reason').lower()}") from error
    print(f"muster: wrote {file}", file=sys.stderr)
