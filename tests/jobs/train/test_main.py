"""How a rank ends: exit codes and what is said, also where nothing can be said."""

import errno
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from jobs import exits
from jobs.errors import StorageError
from jobs.reports import Reporter
from jobs.train.main import FAILED, guarded


def full_disk(reporter: Reporter) -> int:
    raise StorageError("metrics.jsonl: No space left on device; free some space")


def print_on_full_disk(reporter: Reporter) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def own_mistake(reporter: Reporter) -> int:
    raise FileNotFoundError(errno.ENOENT, "No such file or directory")


@pytest.mark.parametrize(
    ("work", "code"), [(full_disk, exits.STORAGE), (print_on_full_disk, exits.STORAGE), (own_mistake, FAILED)]
)
def test_a_standard_error_on_the_same_full_disk_does_not_hide_the_code(
    work: Callable[[Reporter], int], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = Path("/dev/full").open("w", buffering=1)  # noqa: SIM115 - closing it fails, as it must
    monkeypatch.setattr(sys, "stderr", full)
    assert guarded(work) == code
    monkeypatch.undo()
    with pytest.raises(OSError, match="No space left"):
        full.close()


def test_a_failure_is_said_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert guarded(full_disk) == exits.STORAGE
    assert capsys.readouterr().err == "muster: metrics.jsonl: No space left on device; free some space\n"
