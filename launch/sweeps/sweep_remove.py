"""Remove sweeps: the runs, which must all be over, then the sweep's own folder."""

from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from muster.jobs.basics.errors import MusterError, RunFolderError
from muster.jobs.basics.reading import UntrustedError
from muster.jobs.runfolder.rundir import RunDir, open_run
from muster.launch.submit.claim import claimed, is_claimed
from muster.launch.submit.removing import check_made_by_us, check_run, delete, move_away, remove_run
from muster.launch.sweeps.sweep import SweepRecord, sweeps_in


def runs_of(folder: Path) -> list[RunDir]:
    """Return the run folders of a sweep that exist. Errors as for `SweepRecord.read` and `SweepRecord.runs`."""
    return [run for run in SweepRecord.read(folder).runs(folder) if run.path.is_dir()]


def live_runs(root: Path) -> set[str]:
    """Return the ids of all runs of sweeps that a process is still running. Sweeps that cannot be read are skipped."""
    found: set[str] = set()
    for folder in sweeps_in(root):
        with suppress(MusterError):
            if is_claimed(RunDir(open_run(folder).path)):
                found.update(SweepRecord.read(folder).run_ids)
    return found


def remove_emptied(root: Path, removed: Collection[str]) -> list[str]:
    """Remove the folders of sweeps whose last runs are among the `removed` ones; return their names.

    Errors as for `remove_sweep`.
    """
    gone = []
    for folder in sweeps_in(root):
        with suppress(RunFolderError, UntrustedError):  # a record that cannot be read, or of another user
            if not runs_of(open_run(folder).path) and not {*removed}.isdisjoint(SweepRecord.read(folder).run_ids):
                remove_sweep(folder)
                gone.append(folder.name)
    return gone


def remove_sweep(folder: Path) -> None:
    """Remove a sweep with its runs. If one of them is not over, nothing is removed.

    Raises:
        RefusedError: if it is not the folder of a sweep, a process is still starting its runs, or a run is not over.
        UntrustedError: if a folder belongs to another user.
        RunFolderError, StorageError: if a folder cannot be deleted.
    """
    check_sweep(folder)
    with claimed(RunDir(folder)):
        for run in runs_of(folder):
            remove_run(run)
        moved = move_away(folder)
    delete(moved)


def check_sweep(folder: Path) -> None:
    """Check that a sweep and its runs may be removed. Errors as for `remove_sweep`."""
    check_made_by_us(folder)
    for run in runs_of(folder):
        check_run(run)
