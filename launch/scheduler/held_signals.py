"""The signals that ask for an end, held back between the submission of a job and the moment at which it is followed."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

SIGNALS: Final = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "SIGHUP"}


@contextmanager
def holding_signals() -> Iterator[list[str]]:
    """Hold back the signals that ask for an end, for `follow` to answer: a job must not be left behind.

    They are blocked, so that sbatch, which inherits that, is not ended by a Ctrl-C either; and noted in the list that
    is yielded, for another thread of this process may take one.
    """
    asked: list[str] = []
    before = {each: signal.signal(each, noting(asked)) for each in SIGNALS}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield asked
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for each, handler in before.items():
            signal.signal(each, handler)


def noting(asked: list[str]) -> Callable[[int, FrameType | None], None]:
    """Return a handler that notes who asks for an end."""

    def note(number: int, frame: FrameType | None) -> None:
        asked.append(SIGNALS[signal.Signals(number)])

    return note
