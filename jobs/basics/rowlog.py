"""A log of rows whose disk may be full for a while: what it does not take is kept, and written when it does again."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from muster.jobs.basics.errors import StorageError
from muster.jobs.basics.files import append_lines

MOST_KEPT: Final = 10_000  # rows; of more the oldest are given up


class RowLog:
    """Appends rows to one file. `patient`: a full or failing disk is said once, and not raised."""

    def __init__(self, path: Path, *, patient: bool, say: Callable[[str], None]) -> None:
        self.path = path
        self.patient = patient
        self.say = say
        self.kept: list[dict[str, Any]] = []
        self._is_full = False

    def append(self, rows: Sequence[dict[str, Any]]) -> None:
        """Write rows, and before them those that were kept.

        Raises:
            StorageError: the disk is full or failing, and the log is not patient.
            RunFolderError: it cannot be written for another reason.
        """
        self.kept += rows
        try:
            append_lines(self.path, self.kept)
        except StorageError as error:
            if not self.patient:
                raise
            if not self._is_full:
                self._is_full = True
                self.say(f"{error}; its rows are kept until the disk takes them again")
            del self.kept[:-MOST_KEPT]
            return
        if self._is_full:
            self._is_full = False
            self.say(f"{self.path}: {len(self.kept)} rows that the disk had not taken are written now")
        self.kept.clear()

    def give_out(self) -> None:
        """Write what was kept, or as many of the newest rows as the disk takes."""
        while self.kept:
            self.append([])
            del self.kept[: (len(self.kept) + 1) // 2]
