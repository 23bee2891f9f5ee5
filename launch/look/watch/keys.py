"""The terminal of `muster watch`: another screen, keys as they are pressed, and everything as before afterwards.

    with Terminal() as terminal:            whatever ends the block, the terminal is as it was
        terminal.show(lines)
        keys = terminal.keys(1.0)           None after a second, "" as soon as the size has changed

Ctrl-Z leaves the other screen, and `fg` comes back to it; SIGTERM and SIGHUP end the program after it.
"""

import os
import select
import signal
import sys
import termios
import tty
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import FrameType
from typing import Any, Final

from rich.console import ConsoleDimensions, Group
from rich.live import Live
from rich.text import Text

from muster.jobs.basics.terminal import raw
from muster.launch.common import screen

MOST_KEYS: Final = 64
NAMES: Final = {"\x1b[A": "k", "\x1b[B": "j", "\x1bOA": "k", "\x1bOB": "j", "\x1b[5~": "b", "\x1b[6~": " "}
NAMES_OF_ENDS: Final = {"\x1b[H": "g", "\x1b[F": "G", "\x1b[1~": "g", "\x1b[4~": "G"}


class Suspended(BaseException):
    """Ctrl-Z was pressed."""


class Terminal:
    """The terminal while a run is watched."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._live: Live | None = None
        self._wakes, self._wake = -1, -1

    def __enter__(self) -> "Terminal":
        try:
            self._enter()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _enter(self) -> None:
        self._wakes, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._stack.callback(os.close, self._wakes)
        self._stack.callback(os.close, self._wake)
        if sys.stdin.isatty():
            before = termios.tcgetattr(sys.stdin)
            self._stack.callback(termios.tcsetattr, sys.stdin, termios.TCSAFLUSH, before)
            tty.setcbreak(sys.stdin)  # Ctrl-C still is SIGINT
        self._live = Live(
            console=screen.live(raw(sys.stdout)), screen=True, auto_refresh=False, redirect_stdout=False,
            redirect_stderr=False,
        )  # fmt: skip
        self._live.start()
        self._stack.callback(self._live.stop)
        self._stack.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False))
        self._handle(signal.SIGWINCH, lambda *_: None)  # it only wakes `keys`
        self._handle(signal.SIGTSTP, _suspend)
        self._handle(signal.SIGTERM, _end)
        self._handle(signal.SIGHUP, _end)

    def _handle(self, number: signal.Signals, handler: Callable[[int, FrameType | None], Any]) -> None:
        self._stack.callback(signal.signal, number, signal.signal(number, handler))

    @staticmethod
    def size() -> tuple[int, int]:
        """Return columns and lines as they are now, whatever COLUMNS was when the shell exported it."""
        return os.get_terminal_size(sys.stdout.fileno())

    def show(self, lines: Sequence[Text]) -> None:
        """Draw a frame."""
        assert self._live is not None
        self._live.console.size = ConsoleDimensions(*self.size())
        self._live.update(Group(*lines), refresh=True)

    def keys(self, wait_s: float) -> str | None:
        """Return the keys that are pressed within `wait_s`, "" once the size has changed, None if nothing happens.

        Raises:
            EOFError: the terminal is gone.
        """
        watched = [self._wakes, *([sys.stdin.fileno()] if sys.stdin.isatty() else [])]
        ready, _, _ = select.select(watched, [], [], wait_s)
        if not ready:
            return None
        if self._wakes in ready:
            os.read(self._wakes, MOST_KEYS)
        if watched[-1] == self._wakes or watched[-1] not in ready:
            return ""
        pressed = os.read(watched[-1], MOST_KEYS).decode(errors="replace")
        if not pressed:
            raise EOFError
        for sequence, name in {**NAMES, **NAMES_OF_ENDS}.items():
            pressed = pressed.replace(sequence, name)
        return pressed


def stand_still() -> None:
    """Stop this process as Ctrl-Z does, until `fg`."""
    os.kill(os.getpid(), signal.SIGSTOP)


def _suspend(number: int, frame: FrameType | None) -> None:
    raise Suspended


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
