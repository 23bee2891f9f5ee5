"""A log whose disk is full for a while; the full disk is /dev/full, which answers every write with ENOSPC."""

from pathlib import Path
from typing import Any

import pytest

from muster.jobs.basics import rowlog
from muster.jobs.basics.errors import StorageError
from muster.jobs.basics.files import read_lines
from muster.jobs.basics.rowlog import MOST_KEPT, RowLog

FULL = Path("/dev/full")


class Disk:
    """A log file that can be on a full disk."""

    def __init__(self, path: Path, *, patient: bool) -> None:
        self.path = path
        self.said: list[str] = []
        self.log = RowLog(path, patient=patient, say=self.said.append)

    def fill(self) -> None:
        self.log.path = FULL

    def free(self) -> None:
        self.log.path = self.path

    def rows(self) -> list[dict[str, Any]]:
        return list(read_lines(self.path))


def test_rows_are_appended(tmp_path: Path) -> None:
    disk = Disk(tmp_path / "log", patient=True)
    disk.log.append([{"row": 1}])
    disk.log.append([{"row": 2}, {"row": 3}])
    assert disk.rows() == [{"row": 1}, {"row": 2}, {"row": 3}]
    assert disk.said == []


def test_what_a_full_disk_does_not_take_is_written_when_it_does_again(tmp_path: Path) -> None:
    disk = Disk(tmp_path / "log", patient=True)
    disk.fill()
    disk.log.append([{"row": 1}])
    disk.log.append([{"row": 2}])
    assert len(disk.said) == 1
    assert "No space left on device" in disk.said[0]
    disk.free()
    disk.log.append([{"row": 3}])
    assert disk.rows() == [{"row": 1}, {"row": 2}, {"row": 3}]
    assert disk.said[1].endswith("3 rows that were kept in memory are now written")
    disk.log.append([{"row": 4}])
    assert [row["row"] for row in disk.rows()] == [1, 2, 3, 4]


def test_an_impatient_log_says_at_once_that_the_disk_is_full(tmp_path: Path) -> None:
    disk = Disk(tmp_path / "log", patient=False)
    disk.fill()
    with pytest.raises(StorageError, match="No space left on device"):
        disk.log.append([{"row": 1}])


def test_of_too_many_rows_the_newest_are_kept(tmp_path: Path) -> None:
    disk = Disk(tmp_path / "log", patient=True)
    disk.fill()
    disk.log.append([{"row": row} for row in range(MOST_KEPT + 5)])
    disk.free()
    disk.log.append([])
    assert [row["row"] for row in disk.rows()] == list(range(5, MOST_KEPT + 5))


def test_what_is_kept_is_given_out_as_far_as_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(tmp_path / "log", patient=True)
    disk.fill()
    disk.log.append([{"row": row} for row in range(10)])
    disk.free()
    append = rowlog.append_lines
    monkeypatch.setattr(rowlog, "append_lines", lambda path, rows: append(path if len(rows) <= 3 else FULL, rows))
    disk.log.give_out()
    assert [row["row"] for row in disk.rows()] == [8, 9]
    disk.log.append([{"row": 10}])
    assert [row["row"] for row in disk.rows()] == [8, 9, 10]
