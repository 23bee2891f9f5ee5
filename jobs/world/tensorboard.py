"""Event files for TensorBoard, in `<run>/tensorboard`."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from muster.jobs.basics.errors import RefusedError
from muster.jobs.basics.terminal import warn

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

PLACE: Final = frozenset({"step", "time"})  # of a row: where its numbers belong


class EventFiles:
    """Writes rows of metrics as scalars; the files of all attempts are one run to TensorBoard.

    The first step of an attempt purges what an earlier one has written from that step on: those steps are done again.
    """

    def __init__(self, run: Path, asked: str) -> None:
        """Check that the package is there; `asked` is the setting that needs it.

        Raises:
            RefusedError: this Python has no tensorboard.
        """
        try:
            import torch.utils.tensorboard  # noqa: F401
        except ImportError as error:
            raise RefusedError(
                f"{asked} needs the package tensorboard in the Python of rank 0; install it, or leave {asked} out"
            ) from error
        self.folder = run / "tensorboard"
        self._files: SummaryWriter | None = None
        self._is_full = False

    def write(self, rows: Sequence[Mapping[str, Any]], names: Iterable[str] | None = None, prefix: str = "") -> None:
        """Write the numbers of rows, all of them or some; each row has a step and a time.

        A disk that is full ends the event files of this attempt, not the training.
        """
        if self._is_full or not rows:
            return
        try:
            if self._files is None:
                from torch.utils.tensorboard import SummaryWriter

                self._files = SummaryWriter(str(self.folder), purge_step=rows[0]["step"])
            for row in rows:
                for name in row.keys() - PLACE if names is None else names:
                    if isinstance(value := row.get(name), int | float):
                        self._files.add_scalar(prefix + name, value, row["step"], row["time"])
            self._files.flush()
        except OSError as error:
            self._is_full = True
            warn(f"{self.folder}: {error}; no more event files are written in this attempt")
