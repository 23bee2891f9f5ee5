"""Figures as files. Equal figures give equal files, byte for byte."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from muster.jobs.basics.files import write_bytes

NO_DATES: Final[dict[str, dict[str, Any]]] = {
    ".png": {"Software": None},
    ".svg": {"Date": None},
    ".pdf": {"CreationDate": None, "Producer": None, "Creator": None},
}


class NothingToPlotError(ValueError):
    """No row has the values to plot."""


@contextmanager
def drawing(path: Path, width: float, height: float) -> Iterator[Any]:
    """Yield an empty figure of a size in inches, and write it; the suffix selects the format: .png, .svg or .pdf.

    Raises:
        RunFolderError, StorageError: if it cannot be written.
    """
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with rc_context({"svg.hashsalt": "muster", "font.size": 9, "svg.fonttype": "path"}):
        figure, drawn, kind = Figure(figsize=(width, height), layout="constrained"), io.BytesIO(), path.suffix.lower()
        FigureCanvasAgg(figure)
        yield figure
        figure.savefig(drawn, format=kind.removeprefix("."), dpi=120, metadata=NO_DATES[kind])
    write_bytes(path, drawn.getvalue())
