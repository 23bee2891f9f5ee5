"""Figures as files. The same figure makes the same file, byte for byte, apart from the command in its metadata."""

import io
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from muster.jobs.basics.errors import RefusedError
from muster.jobs.basics.files import write_bytes
from muster.jobs.basics.terminal import printable

NO_DATES: Final[dict[str, dict[str, Any]]] = {
    ".png": {"Software": None},
    ".svg": {"Date": None},
    ".pdf": {"CreationDate": None, "Producer": None, "Creator": None},
}
COMMAND: Final = {".png": "Description", ".svg": "Description", ".pdf": "Subject"}  # the key that holds it


class NothingToPlotError(ValueError):
    """No row has the values to plot."""


@contextmanager
def drawing(path: Path, width: float, height: float, *, command: str = "") -> Iterator[Any]:
    """Yield an empty figure of so many inches, and write it; the suffix says what kind: .png, .svg or .pdf.

    `command` is the command line that made it, which is written into the file's metadata.

    Raises:
        RefusedError: matplotlib is not installed.
        RunFolderError, StorageError: it cannot be written.
    """
    drawn, kind = io.BytesIO(), path.suffix.lower()
    with sheet(width, height, {"svg.fonttype": "path"}) as figure:
        yield figure
        about = {COMMAND[kind]: _encodable(command)} if command else {}
        figure.savefig(drawn, format=kind.removeprefix("."), dpi=120, metadata=NO_DATES[kind] | about)
    write_bytes(path, drawn.getvalue())


@contextmanager
def sheet(width: float, height: float, settings: dict[str, Any]) -> Iterator[Any]:
    """Yield an empty figure of so many inches, under our settings of matplotlib and the given ones.

    Raises:
        RefusedError: matplotlib is not installed.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        need = f"plots need {error.name}, which {sys.executable} does not have"
        raise RefusedError(f"{need}; install the extra `plots`: ./setup.sh, or pip install '.[plots]'") from error
    ours: Any = {"svg.hashsalt": "muster", "font.size": 9, **settings}
    with rc_context(ours), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")  # names in any script; a box is drawn instead
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(figure)
        yield figure


def _encodable(text: str) -> str:
    """Escape what a file's metadata cannot hold: control characters, and bytes of arguments that are no UTF-8."""
    return printable(text).encode(errors="backslashreplace").decode()
