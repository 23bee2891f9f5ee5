"""Write figures to files. Equal figures give equal files, byte for byte, apart from the command in the metadata."""

import io
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
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
COMMAND: Final = {".png": "Description", ".svg": "Description", ".pdf": "Subject"}  # the metadata key of the command


class NothingToPlotError(ValueError):
    """No row has the values to plot."""


@contextmanager
def drawing(path: Path, width: float, height: float, *, command: str = "") -> Iterator[Any]:
    """Yield an empty figure of a size in inches; then write it, as .png, .svg or .pdf according to the suffix.

    `command`, the command line that draws the figure, is stored in the file's metadata.

    Raises:
        RefusedError: if matplotlib is not installed.
        RunFolderError, StorageError: if the file cannot be written.
    """
    drawn, kind = io.BytesIO(), path.suffix.lower()
    with sheet(width, height, {"svg.fonttype": "path"}) as figure:
        yield figure
        about = {COMMAND[kind]: _encodable(command)} if command else {}
        figure.savefig(drawn, format=kind.removeprefix("."), dpi=120, metadata=NO_DATES[kind] | about)
    write_bytes(path, drawn.getvalue())


@contextmanager
def sheet(width: float, height: float, settings: dict[str, Any]) -> Iterator[Any]:
    """Yield an empty figure of a size in inches, with Muster's matplotlib settings and the given ones.

    Raises:
        RefusedError: if matplotlib is not installed.
    """
    try:
        with library_folder():
            from matplotlib import rc_context, rcdefaults, rcParams
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        need = f"plots need {error.name}, which {sys.executable} does not have"
        raise RefusedError(f"{need}; install the extra `plots`: ./setup.sh, or pip install '.[plots]'") from error
    ours: Any = {"svg.hashsalt": "muster", "font.size": 9, **settings}
    with rc_context(), warnings.catch_warnings():
        rcdefaults()
        rcParams.update(ours)
        warnings.filterwarnings("ignore", "Glyph .* missing from")  # missing characters become boxes
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(figure)
        yield figure


@contextmanager
def library_folder() -> Iterator[None]:
    """Import matplotlib in its own folder, whose settings are its defaults.

    On import it reads `matplotlibrc` of the current folder, which may be a stranger's. `MPLBACKEND` may be invalid.
    """
    found = None if "matplotlib" in sys.modules else find_spec("matplotlib")
    data = Path(found.origin or "").parent / "mpl-data" if found is not None else None
    if data is None or not data.is_dir():
        yield
        return
    here, backend = os.open(".", os.O_PATH), os.environ.pop("MPLBACKEND", None)
    try:
        os.chdir(data)
        yield
    finally:
        os.fchdir(here)
        os.close(here)
        if backend is not None:
            os.environ["MPLBACKEND"] = backend


def _encodable(text: str) -> str:
    """Escape control characters and bytes that are not UTF-8, which a file's metadata cannot store."""
    return printable(text).encode(errors="backslashreplace").decode()
