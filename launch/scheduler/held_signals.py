"""Requests to stop a run: signals to this process, and the file stop.json, which the run's supervisor reads."""

import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Final

from muster.jobs.basics.files import write_json
from muster.jobs.runfolder.rundir import RunDir
from muster.launch.records.runrows import read_rows

SIGNALS: Final = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "SIGHUP"}
BY_SIGNAL: Final = tuple(f"stopped by {by}" for by in SIGNALS.values())


def asking() -> list[signal.Signals]:
    """Return the signals that ask this process to end, without SIGHUP if nohup has disabled it."""
    return [each for each in SIGNALS if each != signal.SIGHUP or signal.getsignal(each) is not signal.SIG_IGN]


def request_stop(run: RunDir, grace_s: float | None, *, now: bool, who: str = "") -> None:
    """Ask a run's supervisor to stop it. `who`: the requester (default: `muster stop`).

    Errors as for `write_json`.
    """
    by = f"{socket.gethostname()}:{os.getpid()}"
    write_json(run.stop, {"time": time.time(), "grace_s": grace_s, "now": now, "by": by, "who": who})


def ended_by_signal(run: RunDir) -> bool:
    """Return whether Ctrl-C or another signal asked for the end of a run, regardless of its verdict."""
    return read_rows(run).asked in BY_SIGNAL


def holding_signals() -> AbstractContextManager[list[str]]:
    """Block the signals that ask for an end until `follow` handles them, so that no submitted job is left behind.

    sbatch inherits the blocked signals, so Ctrl-C does not end it either. Signals that another thread receives are
    recorded in the yielded list.
    """
    return listening([], signal.SIG_BLOCK)


@contextmanager
def listening(asked: list[str], how: int = signal.SIG_UNBLOCK) -> Iterator[list[str]]:
    """Catch the signals that ask for an end, and record their names in the yielded list."""

    def note(number: int, frame: FrameType | None) -> None:
        asked.append(SIGNALS[signal.Signals(number)])

    before = {each: signal.signal(each, note) for each in asking()}
    mask = signal.pthread_sigmask(how, before)
    try:
        yield asked
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for each, handler in before.items():
            signal.signal(each, handler)
