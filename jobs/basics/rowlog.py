"""A log of rows that survives a full disk: rows that could not be written are kept in memory and written later."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from muster.jobs.basics.errors import StorageError
from muster.jobs.basics.files import append_lines

MOST_KEPT: Final = 10_000  # rows; if there are more, the oldest are dropped


class RowLog:
    """A log of rows in one file. If `patient`, a full or failing disk is reported once and raises no error."""

    def __init__(self, path: Path, *, patient: bool, say: Callable[[str], None]) -> None:
        self.path = path
        self.patient = patient
        self.say = say
        self.kept: list[dict[str, Any]] = []
        self._is_full = False

    def append(self, rows: Sequence[dict[str, Any]]) -> None:
        """Write the kept rows, then `rows`.

        Raises:
            StorageError: if the disk is full or failing, and the log is not patient.
            RunFolderError: if the file cannot be written for another reason.
        """
        self.kept += rows
        try:
            append_lines(self.path, self.kept)
        except StorageError as error:
            if not self.patient:
                raise
            if not self._is_full:
                self._is_full = True
                self.say(f"{error}; rows are kept in memory until the disk has space again")
            del self.kept[:-MOST_KEPT]
            return
        if self._is_full:
            self._is_full = False
            self.say(f"{self.path}: {len(self.kept)} rows that were kept in memory are now written")
        self.kept.clear()

    def give_out(self) -> None:
        """Write the kept rows before the process ends. While they do not fit on the disk, drop the older half."""
        while self.kept:
            self.append([])
            del self.kept[: (len(self.kept) + 1) // 2]
