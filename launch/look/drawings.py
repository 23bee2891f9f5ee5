"""Text drawings of a pipeline's step for the terminal."""

import os
import shutil
import sys
from collections.abc import Sequence

from muster.pipe.schedules.draw import Rows, legend, text


def on_screen(rows: Rows, *, wide: int, names: Sequence[str] = ()) -> str:
    """Draw rows across the terminal's width (or `wide` columns without a terminal), followed by a legend."""
    terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size((wide, 24)).columns if terminal else wide
    drawn = text(rows, width=width, names=names, colour=terminal and "NO_COLOR" not in os.environ)
    return f"{drawn}\n\n{legend(rows)}"
