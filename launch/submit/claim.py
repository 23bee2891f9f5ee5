"""A lock that lets only one process resume or remove a finished run, or run the points of a sweep.

    claims/claim-000001.json   {"host", "pid", "pid_start", "time"}   linked into place, complete, by one process only
           claim-000002.json   the next claim, after the previous one was given back or its process ended

Only the newest claim counts. Numbers are never reused and claims never deleted. So if two processes see the same
newest claim, only one of them can create the next. A killed process leaves its claim behind. On the same host, others
see that the process is gone. On another host, an old claim is ignored, because the run's lease then shows whether the
run is supervised.
"""

import os
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from muster.jobs.basics.errors import RefusedError
from muster.jobs.basics.files import folder_error, write_json
from muster.jobs.runfolder.rundir import RunDir
from muster.launch.common import processes
from muster.launch.common.host import identity
from muster.launch.records.lease import DEAD_S
from muster.launch.records.runrows import number, read_json, real
from muster.launch.records.runstate import is_here


@contextmanager
def claimed(run: RunDir) -> Iterator[None]:
    """Hold the claim to resume a run, which only one process can have.

    Raises:
        RefusedError: if another process holds the claim.
        RunFolderError, StorageError: if the folder cannot be written.
    """
    mine = {**identity(), "time": time.time()}
    own = run.claims / f".{secrets.token_hex(8)}.tmp"
    try:
        run.claims.mkdir(mode=0o700, exist_ok=True)
        write_json(own, mine)
        path = _take(run, own)
    except OSError as error:
        raise folder_error(run.claims, error) from error
    finally:
        with suppress(OSError):  # on a read-only disk the file was never created
            own.unlink(missing_ok=True)
    try:
        yield
    finally:
        if path.exists():  # unless `muster rm` has removed the run
            write_json(path, {**mine, "given_back": time.time()})


def _take(run: RunDir, own: Path) -> Path:
    while True:
        last = newest(run)
        found = read_json(claim(run, last)) if last else {}
        if last and not is_free(found, time.time()):
            raise RefusedError(
                f"{run.run_id}: is being resumed already, by pid {found.get('pid')} on {found.get('host')}; "
                f"{run.command('status')} shows it"
            )
        path = claim(run, last + 1)
        with suppress(FileExistsError):  # if another process was faster, check again
            os.link(own, path)
            return path


def is_claimed(run: RunDir) -> bool:
    """Return whether a process holds the claim, as far as this host can tell."""
    last = newest(run)
    return bool(last) and not is_free(read_json(claim(run, last)), time.time())


def claim(run: RunDir, number: int) -> Path:
    """Return the path of claim number `number`; numbers start at 1."""
    return run.claims / f"claim-{number:06d}.json"


def newest(run: RunDir) -> int:
    """Return the number of the newest claim, 0 if there is none."""
    numbers = [path.stem.removeprefix("claim-") for path in run.claims.glob("claim-*.json")]
    return max((int(number) for number in numbers if number.isdecimal()), default=0)


def is_free(found: Mapping[str, Any], now: float) -> bool:
    """Return whether a claim was given back, or its process is gone as far as this host can tell."""
    if "given_back" in found:
        return True
    pid, ticks = number(found.get("pid")), number(found.get("pid_start"))
    if is_here(found.get("host")) and pid is not None and ticks is not None:
        return not processes.is_same(pid, ticks)
    return now - (real(found.get("time")) or 0.0) > DEAD_S
