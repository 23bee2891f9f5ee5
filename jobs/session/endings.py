"""Handle the end of a program with a session: its own errors, Muster's errors, and requests to stop.

an exception of the program   prints its traceback, then the rank and the step; exit code 1
an error of Muster's          prints one line; exit code of the error's class
sys.exit(3)                   recorded as exit code 3, if nothing catches it
raise SystemExit(3)           recorded as failed, with an unknown exit code
os._exit(3), a signal         not recorded, because nothing of the program runs any more; the run is then `lost`
a request to stop             the ranks agree on a step, save, and exit with 75 (jobs/session/loop.py)
"""

import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Callable
from opcode import opname
from types import FrameType, TracebackType
from typing import Any, Final, NoReturn

from muster.jobs.basics import exits
from muster.jobs.basics.errors import MusterError, StartTimeoutError
from muster.jobs.machine import linux
from muster.jobs.node import page
from muster.jobs.node.reports import Reporter
from muster.jobs.session.place import RankPlace

STANDARD_ERROR: Final = 2
STOPS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)  # Slurm sends SIGUSR2 for --signal=USR2@60


class SignalRequests:
    """Requests to stop or save that a rank without an agent receives as signals."""

    of_rank = True  # worker processes do not keep these handlers (`jobs/machine/workers.py`)

    def __init__(self) -> None:
        self.stop: signal.Signals | None = None
        self.save = False
        self._before: dict[signal.Signals, Any] = {}

    @property
    def exit_code(self) -> int:
        """The exit code of a rank that a signal stopped, after it has saved."""
        return exits.STOPPED if self.stop == signal.SIGINT else exits.REQUEUE

    def listen(self) -> None:
        """Handle the signals that the program does not handle itself. A second Ctrl-C ends the program at once."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in (*STOPS, signal.SIGUSR1):
            if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                self._before[number] = signal.signal(number, self._hear)

    def close(self) -> None:
        """Restore the previous signal handlers."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGUSR1:
            self.save = True
            return
        if self.stop is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.stop = signal.Signals(number)


def open_page(place: RankPlace) -> None:
    """Register this process in the page through which the agent stops it and reads its progress.

    Ignore SIGUSR1, and SIGTERM in a Slurm job: the agent receives the same signals, and saves or stops the ranks.
    """
    if not place.watched:
        return
    if signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    dumps = signal.getsignal(signal.SIGQUIT) == signal.SIG_DFL
    if dumps:
        faulthandler.register(signal.SIGQUIT, file=STANDARD_ERROR, all_threads=True)
    deaf = linux.has_scheduler() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    if deaf:
        # The agent stops a rank that ignores SIGTERM by SIGINT. Python's own handler would not run within a collective.
        if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    page.own.open_session(os.getpid(), deaf=deaf, dumps=dumps)


def report_errors(
    reporter: Reporter, rank: int | str, step: Callable[[], int | None], ended: Callable[[BaseException], None]
) -> None:
    """Install an exception hook that reports an uncaught exception with its rank and step, and passes it to `ended`."""
    before = sys.excepthook

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        ended(error)
        where = f"rank {rank}" if (done := step()) is None else f"rank {rank}, after {done} steps"
        if isinstance(error, MusterError):
            reporter.failed(error, peer=isinstance(error, StartTimeoutError))
            # sys.stderr may be a buffer of torch.distributed's own hook, which is lost with os._exit
            print(f"muster: {where}: {error}", file=sys.__stderr__, flush=True)
            sys.stdout.flush()
            os._exit(error.exit_code)  # an exception hook cannot set the exit code in any other way
        reporter.failed(error, peer=is_lost_peer(error))
        before(kind, error, trace)
        print(f"muster: {where}: {kind.__name__}", file=sys.stderr, flush=True)

    sys.excepthook = report


class ProgramEnd:
    """How this process ends, as far as its own code can see.

    `status`: what `sys.exit` was given when it ended the program. `seen`: it did end it.
    """

    def __init__(self) -> None:
        self.status: Any = None
        self.seen = False
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        while frame is not None and frame.f_back is not None:
            frame = frame.f_back
        self._outermost = frame

    def watch(self) -> None:
        """Make `sys.exit` raise an exception that shows whether it ends the program. No hook of Python's does this.

        The interpreter then reads the attribute `code` of the exception from C, so no frame is below the property's.
        Code that catches the exception reads it from a frame, or not at all.
        """
        end = self

        class ProgramExit(SystemExit):
            @property
            def code(self) -> Any:  # type: ignore[override]
                status = self.args[0] if self.args else None
                if sys._getframe().f_back is None:
                    end.status, end.seen = status, True
                return status

            def __reduce__(self) -> tuple[Any, ...]:  # worker processes send exceptions to their parent
                return SystemExit, self.args

        def leave(status: Any = None, /) -> NoReturn:
            raise ProgramExit(status)

        ProgramExit.__name__ = ProgramExit.__qualname__ = SystemExit.__name__
        own, built_in, sys.exit = vars(sys.modules["__main__"]), sys.exit, leave
        own.update({name: leave for name, value in own.items() if value is built_in})

    def error(self) -> BaseException | None:
        """Return the exception that ended the program, even if the program has replaced the exception hook."""
        return None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)  # interactive Python continues

    def ran_through(self) -> bool:
        """Return whether the program came to its end: the outermost frame of the main thread has returned."""
        if self._outermost is None or hasattr(sys, "ps1"):
            return True
        return opname[self._outermost.f_code.co_code[self._outermost.f_lasti]].startswith("RETURN")


def is_lost_peer(error: BaseException) -> bool:
    """Return True if an exception was caused by the loss of another rank."""
    if "torch" not in sys.modules:
        return False
    from muster.jobs.world.failures import is_lost_connection

    return is_lost_connection(error)
