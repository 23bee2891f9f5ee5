"""The terminal of `muster watch`: the alternate screen, with unbuffered keys; the terminal is restored at the end.

    with opened() as terminal:              restores the terminal however the block ends
        terminal.show(lines)
        keys = terminal.keys(1.0)           None after a second, "" once the size has changed

Ctrl-Z leaves the alternate screen, and `fg` returns to it. SIGTERM and SIGHUP restore the terminal and end the program.
"""

import os
import select
import signal
import sys
import termios
import tty
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Final

from rich.console import ConsoleDimensions, Group
from rich.live import Live
from rich.text import Text

from muster.jobs.basics.terminal import raw
from muster.launch.common import screen

MOST_KEYS: Final = 64
NAMES: Final = {
    "\x1b[A": "k",
    "\x1b[B": "j",
    "\x1bOA": "k",
    "\x1bOB": "j",
    "\x1b[5~": "b",
    "\x1b[6~": " ",  # arrows, pages
    "\x1b[H": "g",
    "\x1b[F": "G",
    "\x1b[1~": "g",
    "\x1b[4~": "G",  # Home, End
}


class Suspended(BaseException):
    """Raised when Ctrl-Z is pressed."""


class Terminal:
    """The terminal while a run is watched. `wakes` is a file descriptor that becomes readable on a signal."""

    def __init__(self, live: Live, wakes: int) -> None:
        self._live = live
        self._wakes = wakes

    @staticmethod
    def size() -> tuple[int, int]:
        """Return the current columns and lines of the terminal, ignoring the variable COLUMNS."""
        return os.get_terminal_size(sys.stdout.fileno())

    def show(self, lines: Sequence[Text]) -> None:
        """Draw a frame."""
        self._live.console.size = ConsoleDimensions(*self.size())
        self._live.update(Group(*lines), refresh=True)

    def keys(self, wait_s: float) -> str | None:
        """Return the keys pressed within `wait_s` seconds, "" if the size changes, or None if nothing happens.

        Raises:
            EOFError: if the terminal is gone.
        """
        typed = [sys.stdin.fileno()] if sys.stdin.isatty() else []
        ready, _, _ = select.select([self._wakes, *typed], [], [], wait_s)
        if self._wakes in ready:
            os.read(self._wakes, MOST_KEYS)
        if not typed or typed[0] not in ready:
            return "" if ready else None
        pressed = os.read(typed[0], MOST_KEYS).decode(errors="replace")
        if not pressed:
            raise EOFError
        for sequence, name in NAMES.items():
            pressed = pressed.replace(sequence, name)
        return pressed


@contextmanager
def opened() -> Iterator[Terminal]:
    """Switch to the alternate screen with unbuffered keys, and restore the terminal when the `with` block ends."""
    with ExitStack() as stack:
        wakes, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        stack.callback(os.close, wakes)
        stack.callback(os.close, wake)
        if sys.stdin.isatty():
            stack.callback(termios.tcsetattr, sys.stdin, termios.TCSAFLUSH, termios.tcgetattr(sys.stdin))
            tty.setcbreak(sys.stdin)  # Ctrl-C still sends SIGINT
        live = Live(console=screen.live(raw(sys.stdout)), screen=True, auto_refresh=False, redirect_stdout=False)
        stack.enter_context(live)
        stack.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(wake, warn_on_full_buffer=False))
        for number, handler in HANDLERS.items():
            stack.callback(signal.signal, number, signal.signal(number, handler))
        yield Terminal(live, wakes)


def stand_still() -> None:
    """Suspend this process like Ctrl-Z, until `fg`."""
    os.kill(os.getpid(), signal.SIGSTOP)


def _suspend(number: int, frame: FrameType | None) -> None:
    raise Suspended


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


HANDLERS: Final[Mapping[signal.Signals, Callable[[int, FrameType | None], None]]] = {
    signal.SIGWINCH: lambda number, frame: None,  # the handler does nothing, but the signal wakes `keys`
    signal.SIGTSTP: _suspend,
    signal.SIGTERM: _end,
    signal.SIGHUP: _end,
}
