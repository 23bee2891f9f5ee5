"""Remove run folders: only what Muster made, belongs to this user, and is over.

    runs/<run> ──rename──→ runs/.removed-<run> ──delete──→ gone

The rename hides the run from every other command in one step. If the deletion is interrupted, the next `muster rm`
or `muster prune` completes it.
"""

import os
import re
import shutil
import stat
from pathlib import Path
from typing import Final

from muster.jobs.basics.errors import MusterError, RefusedError, RunFolderError
from muster.jobs.basics.ownership import check_parents
from muster.jobs.basics.reading import UntrustedError
from muster.jobs.runfolder.rundir import RunDir
from muster.launch.common import processes
from muster.launch.common.screen import say
from muster.launch.records.runrows import read_rows
from muster.launch.records.runstate import read_state
from muster.launch.records.slurm_job import FROM_OUTSIDE, SlurmJob
from muster.launch.submit.claim import claimed

REMOVED: Final = ".removed-"
MADE_BY_US: Final = re.compile(r".+-\d{8}T\d{6}(\.\d{3})?Z-[0-9a-f]{6}")  # a name made by `run_path`


def remove_run(run: RunDir) -> None:
    """Remove the folder of a run that is over. No other process can resume the run meanwhile.

    Raises:
        UntrustedError: if the folder belongs to another user.
        RefusedError: if it is not the folder of a run, or the run is not over.
        RunFolderError, StorageError: if it cannot be deleted.
    """
    check_run(run)
    with claimed(run):
        check_run(run)  # again, because it may have been resumed before the claim
        moved = move_away(run.path)
    delete(moved)


def check_run(run: RunDir) -> None:
    """Check that a run may be removed. Errors as for `remove_run`."""
    check_made_by_us(run.path)
    if run.submission.exists() and not run.events.exists():
        return  # a point of a sweep that has not begun
    if not read_rows(run).submitted:
        raise RefusedError(f"{run.path}: its events.jsonl has no record of a run, so it was not removed")
    check_over(run)


def check_over(run: RunDir) -> None:
    """Check that no process will write to a run any more, and that no scheduler will start it again.

    Raises:
        RefusedError: if the run is alive, or may be.
    """
    state = read_state(run)
    stop = run.command("stop")
    if not state.is_over:
        raise RefusedError(f"{run.run_id}: is {state.label}, so it was not removed; stop it first: {stop}")
    if processes.started_for(run.run_id):
        raise RefusedError(f"{run.run_id}: has processes on this host, so it was not removed; end them first: {stop}")
    if state.code in FROM_OUTSIDE and not run.stop.exists() and (job := SlurmJob.read(run)) is not None:
        try:
            waits = (found := job.ask()) is not None and found.phase == "pending"
        except MusterError as error:
            raise RefusedError(
                f"{run.run_id}: Slurm might restart this run, and its queue cannot be read: {error}; "
                f"to remove the run, {stop} first"
            ) from error
        if waits:
            raise RefusedError(f"{run.run_id}: waits in Slurm's queue, so it was not removed; stop it first: {stop}")


def complete_removals(root: Path) -> None:
    """Delete what interrupted removals left in a folder of runs; report on standard error what cannot be deleted."""
    for path in sorted(root.glob(f"{REMOVED}*")):
        try:
            status = path.lstat()
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
                delete(path)
        except FileNotFoundError:
            continue  # another process has deleted it
        except RunFolderError as error:
            say(str(error))


def check_made_by_us(folder: Path) -> None:
    """Check that a folder is named like those of Muster, and belongs to this user. Errors as for `remove_run`."""
    status = folder.lstat()
    if stat.S_ISLNK(status.st_mode):
        raise RefusedError(f"{folder}: is a link, so it was not removed; remove the link itself with rm")
    if status.st_uid != os.geteuid():
        raise UntrustedError(f"{folder}: belongs to user {status.st_uid}, so it was not removed; ask its owner")
    if not MADE_BY_US.fullmatch(folder.name):
        raise RefusedError(
            f"{folder}: is not named like a folder of Muster (NAME-TIME-ID), so it was not removed; "
            "if it is a renamed run, delete it with rm -r"
        )
    check_parents(folder)


def move_away(folder: Path) -> Path:
    """Rename a folder, so that no command finds it; return its new path. Errors as for `remove_run`."""
    moved = folder.with_name(REMOVED + folder.name)
    try:
        folder.rename(moved)
    except OSError as error:
        raise _failed(folder, error) from error
    return moved


def delete(moved: Path) -> None:
    """Delete a folder that was moved away. Errors as for `remove_run`."""
    try:
        shutil.rmtree(moved)  # does not follow links
    except FileNotFoundError:
        return  # another process has deleted it
    except OSError as error:
        raise _failed(moved, error) from error


def _failed(folder: Path, error: OSError) -> RunFolderError:
    name = str(error.filename or folder)  # an error of rmtree may name a file without its folder
    what = name if name.startswith("/") else f"{folder}: {name}"
    return RunFolderError(f"{what}: cannot be deleted: {error.strerror}; make it writable, then repeat the command")
