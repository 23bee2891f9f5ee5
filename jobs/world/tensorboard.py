"""Write event files for TensorBoard, in `<run>/tensorboard`."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from muster.jobs.basics.errors import RefusedError
from muster.jobs.basics.terminal import warn

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

PLACE: Final = frozenset({"step", "time"})  # keys of a row that do not become scalars


class EventFiles:
    """A writer of metrics as scalars. TensorBoard shows the files of all attempts as one run.

    A resumed attempt repeats some steps. So its first write purges the older scalars from its first step on.
    """

    def __init__(self, run: Path, asked: str) -> None:
        """Check that tensorboard is installed. `asked`: the setting that needs it, for the message.

        Raises:
            RefusedError: if this Python has no tensorboard.
        """
        try:
            import torch.utils.tensorboard  # noqa: F401
        except ImportError as error:
            raise RefusedError(
                f"{asked} needs the package tensorboard in the Python of rank 0; install it, or remove {asked}"
            ) from error
        self.folder = run / "tensorboard"
        self._files: SummaryWriter | None = None
        self._is_full = False

    def write(self, rows: Sequence[Mapping[str, Any]], names: Iterable[str] | None = None, prefix: str = "") -> None:
        """Write the numbers of each row under the given `names`, or all its numbers, at the row's `step` and `time`.

        If a write fails (the disk may be full), warn and write no more in this attempt. Training continues.
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
