"""Open the session of this rank, once per program, in its main process."""

import atexit
import multiprocessing
import os
import sys
from typing import Final

from muster.jobs.basics.errors import MusterError, RefusedError
from muster.jobs.node import page
from muster.jobs.node.reports import Reporter
from muster.jobs.session.endings import open_page, tell_errors
from muster.jobs.session.place import Place, meeting_variables, read_place
from muster.jobs.session.session import Session

CALLER: Final = 2  # frames up from `_caller`: the line that calls session()
_opened: tuple[int, str] | None = None  # the process and the source line that called session()


def session(name: str | None = None, *, runs: str | None = None, tensorboard: bool = False) -> Session:
    """Open this rank's session, once per program.

    Args:
        name: the name of a run that Muster has not started (default: that of the script).
        runs: the folder of all runs, for such a run (default: MUSTER_RUNS, else ./runs).
        tensorboard: also write logged values for TensorBoard.

    Raises:
        RefusedError: if it was opened before, or this is a worker process of a rank.
    """
    global _opened
    try:
        _refuse_a_second(_opened)
        place = _place(name)
    except MusterError:
        tell_errors(Reporter(os.environ), os.environ.get("RANK", "0"), lambda: None, lambda error: None)
        raise
    _opened = os.getpid(), _caller()
    if "RANK" not in os.environ:
        os.environ.update(meeting_variables(place))
    open_page(place)
    made = Session(place, runs=runs, tensorboard=tensorboard)
    tell_errors(made._reporter, made.rank, made.steps_done, made.failed)
    atexit.register(_at_exit, made, os.getpid())
    return made


def _place(name: str | None) -> Place:
    place = read_place(os.environ, name)
    if place.watched and (owner := page.own.session) not in (0, os.getpid()):
        raise RefusedError(
            f"session: process {owner} of rank {place.env.rank} has opened it, and this is another process; "
            "open it in the program that muster starts, outside of the functions that worker processes run"
        )
    return place


def _refuse_a_second(opened: tuple[int, str] | None) -> None:
    if opened is not None and opened[0] == os.getpid():
        raise RefusedError(f"session: it was opened before, at {opened[1]}; pass that session on")
    if opened is not None or multiprocessing.parent_process() is not None or _is_being_spawned():
        raise RefusedError(
            "session: this is a worker process of a rank, such as a DataLoader's; open the session in the main process "
            'alone, under `if __name__ == "__main__":`'
        )


def _is_being_spawned() -> bool:
    """Return True while a spawned process imports the program, before it knows its parent."""
    return getattr(multiprocessing.current_process(), "_inheriting", False)


def _caller() -> str:
    frame = sys._getframe(CALLER)
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _at_exit(made: Session, pid: int) -> None:
    if os.getpid() != pid:  # a forked child
        return
    try:
        made.close()
    except MusterError as error:
        print(f"muster: rank {made.rank}: {error}", file=sys.stderr, flush=True)
        os._exit(error.exit_code)
