"""How a rank ends: exit codes and what is said, also where nothing can be said."""

import errno
import os
import subprocess
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


def test_a_rank_writes_the_stack_of_every_thread_when_it_is_asked_and_goes_on() -> None:
    script = """
import os, signal, threading
from jobs.train.main import run_rank
waiting = threading.Event()
threading.Thread(target=waiting.wait, daemon=True).start()
run_rank({"job": {}})  # no rank stands in the environment
os.kill(os.getpid(), signal.SIGQUIT)
waiting.set()
print("went on")
"""
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    command = [sys.executable, "-c", script]
    environment["PYTHONPATH"] = str(Path(__file__).parents[3])
    ended = subprocess.run(command, capture_output=True, text=True, timeout=50, env=environment, check=False)
    assert ended.stdout == "went on\n"
    assert "Current thread" in ended.stderr
    assert "in wait" in ended.stderr
