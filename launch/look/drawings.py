"""Drawings of a pipeline's step on the terminal."""

import os
import shutil
import sys
from collections.abc import Sequence

from muster.pipe.schedules.draw import Rows, legend, text


def on_screen(rows: Rows, *, wide: int, names: Sequence[str] = ()) -> str:
    """Draw rows as wide as the terminal, or `wide` columns where the output is none, with what its letters mean."""
    terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size((wide, 24)).columns if terminal else wide
    drawn = text(rows, width=width, names=names, colour=terminal and "NO_COLOR" not in os.environ)
    return f"{drawn}\n\n{legend(rows)}"
