"""Who may begin the next attempt of a run that is over: one process at a time, by a file that is made complete or not.

    resuming.json   {"host", "pid", "pid_start", "time"}   linked into place with its content, so it exists for one only

One that was killed leaves its file behind: on the same host its process is gone; on another, what is old is not
believed any more, for then the run's own lease says whether it is supervised.
"""

import json
import os
import secrets
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from jobs.errors import RefusedError
from jobs.files import folder_error
from jobs.rundir import RunDir
from launch import processes
from launch.look.runrows import number, read_json, real
from launch.look.runstate import is_here
from launch.supervision.lease import DEAD_S

TRIES: Final = 5  # somebody else may put the same stale file aside at the same time


@contextmanager
def claimed(run: RunDir) -> Iterator[None]:
    """Be the only one that resumes a run.

    Raises:
        RefusedError: somebody else is at it.
        RunFolderError, StorageError: the folder cannot be written.
    """
    mine = {"host": socket.gethostname(), "pid": os.getpid(), "pid_start": processes.start_ticks(os.getpid())}
    mine["time"] = time.time()
    path, own = run.claim, run.claim.with_name(f".{run.claim.name}.{secrets.token_hex(4)}.tmp")
    try:
        own.write_text(json.dumps(mine), encoding="utf-8")
        _take(run, path, own)
    except OSError as error:
        raise folder_error(path, error) from error
    finally:
        with suppress(OSError):  # a disk that is read-only did not take it in the first place
            own.unlink(missing_ok=True)
    try:
        yield
    finally:
        if read_json(path) == mine:
            path.unlink(missing_ok=True)


def _take(run: RunDir, path: Path, own: Path) -> None:
    for _ in range(TRIES):
        try:
            os.link(own, path)
            return
        except FileExistsError:
            found = read_json(path)
            if not is_stale(found, time.time()):
                break
            _put_aside(path, found)
    found = read_json(path)
    raise RefusedError(
        f"{run.run_id}: is being resumed already, by pid {found.get('pid')} on {found.get('host')}; "
        f"muster status {run.run_id} shows it"
    )


def is_stale(found: Mapping[str, Any], now: float) -> bool:
    """Say whether a claim is of a process that is gone, as far as can be told from here."""
    pid, ticks = number(found.get("pid")), number(found.get("pid_start"))
    if is_here(found.get("host")) and pid is not None and ticks is not None:
        return not processes.is_same(pid, ticks)
    return now - (real(found.get("time")) or 0.0) > DEAD_S


def _put_aside(path: Path, stale: Mapping[str, Any]) -> None:
    """Remove a stale claim, and no other that came in its place meanwhile."""
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.stale")
    with suppress(FileNotFoundError):  # somebody else was faster
        path.rename(aside)
        if read_json(aside) != stale:
            with suppress(FileExistsError):
                os.link(aside, path)
        aside.unlink()
