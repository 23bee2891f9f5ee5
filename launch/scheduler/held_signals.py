"""Requests to stop a run: the signals that this process gets, and stop.json, which tells the run's supervisor."""

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
    """Return the signals that ask this process for an end: not SIGHUP where nohup has it ignored."""
    return [each for each in SIGNALS if each != signal.SIGHUP or signal.getsignal(each) is not signal.SIG_IGN]


def request_stop(run: RunDir, grace_s: float | None, *, now: bool = False, **said: str) -> None:
    """Ask a run's supervisor to stop it; `said` is who asks or the text of the verdict. Errors as `write_json`."""
    by = f"{socket.gethostname()}:{os.getpid()}"
    write_json(run.stop, {"time": time.time(), "grace_s": grace_s, "now": now, "by": by, **said})


def ended_by_signal(run: RunDir) -> bool:
    """Return whether the user pressed Ctrl-C during a run, or ended this process by a signal, whatever its verdict."""
    return read_rows(run).asked in BY_SIGNAL


def holding_signals() -> AbstractContextManager[list[str]]:
    """Hold back the signals that ask for an end, for `follow` to answer: a job must not be left behind.

    They are blocked, so that sbatch, which inherits that, is not ended by a Ctrl-C either; and noted in the list that
    is yielded, for another thread of this process may take one.
    """
    return listening([], signal.SIG_BLOCK)


@contextmanager
def listening(asked: list[str], how: int = signal.SIG_UNBLOCK) -> Iterator[list[str]]:
    """Take the signals that ask for an end as requests to stop a run; note and yield who asks."""

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
