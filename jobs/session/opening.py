"""Open the session of this rank, once per program, in its main process."""

import atexit
import multiprocessing
import os
import sys
from typing import Final

from muster.jobs.basics.errors import MusterError, RefusedError
from muster.jobs.machine import workers
from muster.jobs.node import page
from muster.jobs.node.reports import Reporter
from muster.jobs.session.endings import open_page, report_errors
from muster.jobs.session.place import RankPlace, meeting_variables, read_place
from muster.jobs.session.session import Session

CALLER: Final = 2  # number of frames from `_caller` up to the line that calls session()
_opened: tuple[int, str] | None = None  # the process and the source line that called session()


def session(name: str | None = None, *, runs: str | None = None, tensorboard: bool = False) -> Session:
    """Open this rank's session, once per program.

    Args:
        name: the name of the run, if Muster has not started it (default: the script's name).
        runs: the folder of all runs, if Muster has not started this one (default: MUSTER_RUNS, else ./runs).
        tensorboard: also write logged values for TensorBoard.

    Raises:
        RefusedError: if the program has opened a session already, or this is a worker process of a rank.
    """
    global _opened
    try:
        _refuse_a_second(_opened)
        place = _place(name)
    except MusterError:
        report_errors(Reporter(os.environ), os.environ.get("RANK", "0"), lambda: None, lambda error: None)
        raise
    _opened = os.getpid(), _caller()
    if "RANK" not in os.environ:
        os.environ.update(meeting_variables(place))
    open_page(place)
    made = Session(place, runs=runs, tensorboard=tensorboard)
    report_errors(made._reporter, made.rank, made.steps_done, made.failed)
    made.end.watch()
    workers.protect()
    atexit.register(_at_exit, made, os.getpid())
    return made


def _place(name: str | None) -> RankPlace:
    place = read_place(os.environ, name)
    if place.watched and (owner := page.own.session) not in (0, os.getpid()):
        raise RefusedError(
            f"session: process {owner} has already opened the session of rank {place.env.rank}; "
            "open it once, in the program that muster starts, not in functions that worker processes run"
        )
    return place


def _refuse_a_second(opened: tuple[int, str] | None) -> None:
    if opened is not None and opened[0] == os.getpid():
        raise RefusedError(f"session: it was already opened at {opened[1]}; pass that session object on")
    if opened is not None or multiprocessing.parent_process() is not None or _is_being_spawned():
        raise RefusedError(
            "session: this is a worker process of a rank, such as a DataLoader's; open the session only in the main "
            'process, under `if __name__ == "__main__":`'
        )


def _is_being_spawned() -> bool:
    """Return True while a spawned process imports the program, before multiprocessing has set its parent process."""
    return getattr(multiprocessing.current_process(), "_inheriting", False)


def _caller() -> str:
    frame = sys._getframe(CALLER)
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _at_exit(made: Session, pid: int) -> None:
    if os.getpid() != pid:  # this process is a forked child
        return
    try:
        made.close()
    except MusterError as error:
        print(f"muster: rank {made.rank}: {error}", file=sys.stderr, flush=True)
        os._exit(error.exit_code)
