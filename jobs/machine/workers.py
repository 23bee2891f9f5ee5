"""Worker processes of a rank (those of a DataLoader, a pool) leave requests to stop or save to the rank.

scancel, a preemption, Ctrl-C and `kill -- -PGID` signal every process of a program. The rank completes its step and
saves, and needs its workers until then. A worker therefore blocks these signals, and one of its threads reads them:

    Process.terminate() of the rank, or the worker itself      the worker obeys
    anything else, even os.kill() of the rank                  the worker obeys once the rank has ended
"""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from multiprocessing.popen_fork import Popen
from multiprocessing.process import BaseProcess
from typing import Any, Final

from muster.jobs.machine.linux import ASKING, signal_mask

POLL_S: Final = 0.1
IDLE_S: Final = 3600.0
# Process.terminate() sends this signal to a worker instead of SIGTERM, which would merge with one to all processes.
TERMINATE: Final = signal.SIGRTMAX - 3
SIGNALS: Final = (*ASKING, TERMINATE)


def protect() -> None:
    """Make the worker processes that this process and its workers start from now on leave such signals to it."""
    original = BaseProcess.start
    if getattr(original, "is_protecting", False):
        return

    def start(self: Any) -> None:
        if type(self).run is not BaseProcess.run or self._target is None:
            original(self)  # a subclass with its own `run`, which nothing can be called before
            return
        if not isinstance(self._target, Protected):
            self._target = Protected(self._target)
        with signal_mask(signal.SIG_BLOCK, SIGNALS):  # the worker's thread reads those that arrive before it begins
            original(self)
        self._popen.is_protected = True

    def send(self: Any, number: int) -> None:
        if number == signal.SIGTERM and getattr(self, "is_protected", False):
            number = TERMINATE
        send_plain(self, number)

    send_plain = Popen._send_signal  # type: ignore[attr-defined]
    start.is_protecting = True  # type: ignore[attr-defined]
    BaseProcess.start = start  # type: ignore[method-assign]
    Popen._send_signal = send  # type: ignore[attr-defined]


class Protected:
    """The function that a worker process runs. It can be pickled for processes that are not forked."""

    def __init__(self, target: Callable[..., object]) -> None:
        self.target = target

    def __call__(self, *args: Any, **options: Any) -> None:
        """Run the function in the worker."""
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        for number in ASKING:  # a forked worker has the rank's handlers
            handler = signal.getsignal(number)
            if handler == signal.SIG_IGN or hasattr(getattr(handler, "__self__", None), "of_rank"):
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        # Programs that the worker starts are its own and can be stopped.
        subprocess.Popen._execute_child = _unmasked(subprocess.Popen._execute_child)  # type: ignore[attr-defined]
        signal.signal(signal.SIGURG, _wake)
        threading.Thread(target=_obey, args=(multiprocessing.parent_process(),), daemon=True).start()
        self.target(*args, **options)


def _unmasked(function: Callable[..., None]) -> Callable[..., None]:
    def run(*args: Any, **options: Any) -> None:
        with signal_mask(signal.SIG_UNBLOCK, SIGNALS):
            function(*args, **options)

    return run


def _wake(*_: object) -> None:
    """Do nothing: the signal itself makes the main thread run the pending handler."""


def _obey(rank: Any) -> None:
    """Read the signals sent to this worker, and deliver those that it must obey. Runs in a thread."""
    held: signal.Signals | None = None  # a signal to obey once the rank has ended
    while True:
        info = signal.sigtimedwait(SIGNALS, IDLE_S if held is None else POLL_S)
        if info is not None and info.si_signo == TERMINATE:
            number = signal.SIGTERM
        elif info is not None and info.si_pid == os.getpid():
            number = signal.Signals(info.si_signo)
        elif info is not None:
            held = signal.Signals(info.si_signo)
            continue
        elif held is None or rank.is_alive():
            continue
        else:
            number = held
        held = None
        data = sys.modules.get("torch.utils.data")
        if number == signal.SIGTERM and data is not None and data.get_worker_info() is not None:
            os._exit(0)  # as torch's own handler does if the rank sent the signal
        with signal_mask(signal.SIG_UNBLOCK, SIGNALS):
            os.kill(os.getpid(), number)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGURG)
