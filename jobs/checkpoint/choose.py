"""Which checkpoint the next attempt begins from: the newest good one of the run's lineage."""

from dataclasses import dataclass
from pathlib import Path

from muster.jobs.basics.errors import BadCheckpointError, MusterError, NoCheckpointError, StorageError
from muster.jobs.checkpoint import disk
from muster.jobs.checkpoint.commit import roll_forward
from muster.jobs.checkpoint.lineage import candidates, folder_names
from muster.jobs.checkpoint.manifest import Manifest
from muster.jobs.checkpoint.names import step_and_attempt
from muster.jobs.checkpoint.verify import is_verified, mark_verified, verify
from muster.jobs.runfolder.checkpointdir import CheckpointDir
from muster.jobs.runfolder.rundir import RunDir


@dataclass(frozen=True)
class Chosen:
    """A checkpoint that was read as a whole and is good."""

    folder: CheckpointDir
    manifest: Manifest


def newest_good(
    run: RunDir,
    *,
    say: disk.Say = lambda _: None,
    step: int | None = None,
    name: str | None = None,
    deep: bool = True,
    mark: bool = True,
) -> Chosen | None:
    """Choose the checkpoint to go on from; None when a run has none that is good.

    First what all writers had saved is committed. Then the lineage is followed; each candidate is read as a whole; a
    bad one is put aside as `bad-...`, said in one line, and the one before it is tried. One that cannot be read at the
    moment is left where it is. `step` takes the newest of that step in the lineage, `name` exactly that folder.

    Raises:
        NoCheckpointError: there is none of that step or name.
        BadCheckpointError: the one asked for is bad; the folder of checkpoints is a link.
        StorageError: the folder of checkpoints cannot be read.
    """
    try:
        roll_forward(run, say=say)
    except MusterError as error:  # a full disk must not hide what is committed already
        say(f"cannot commit what is pending: {error}")
    for folder in _asked_for(run, step, name, say):
        try:
            manifest = verify(folder, deep=deep)
        except FileNotFoundError:
            if name is not None:
                raise NoCheckpointError(f"{folder.path}: was never committed; {_there(run)}") from None
            continue
        except BadCheckpointError as error:
            quarantine(folder, error, say=say)
            if name is not None:
                raise
            continue
        except StorageError as error:
            say(f"{folder.name} cannot be read at the moment and is left alone: {error}")
            continue
        if mark and deep:
            _mark(folder, manifest, say)
        return Chosen(folder, manifest)
    if step is not None:
        raise NoCheckpointError(f"{run.checkpoints}: no good checkpoint of step {step}; {_there(run)}")
    return None


def has_commits(run: RunDir) -> bool:
    """True when a run has committed checkpoints, good, bad or not to be read at the moment; half a save is none.

    Raises:
        BadCheckpointError, StorageError: the folder of checkpoints is a link, or cannot be read.
    """
    return any(
        name.startswith("bad-") or (step_and_attempt(name) is not None and _is_committed(run.checkpoints / name))
        for name in folder_names(run)
    )


def _is_committed(path: Path) -> bool:
    try:
        CheckpointDir(path).manifest.lstat()
    except FileNotFoundError:
        return False
    except OSError:  # who knows; what is there is not to be passed over
        return True
    return True


def quarantine(folder: CheckpointDir, error: BadCheckpointError, *, say: disk.Say) -> None:
    """Put a bad checkpoint aside, so that nobody tries it again; it is kept for who wants to look."""
    try:
        folder.path.rename(folder.bad)
        disk.sync_folder(folder.path.parent)
    except (OSError, MusterError) as problem:
        say(f"{folder.name} is bad ({error}); it cannot be put aside: {problem}")
    else:
        say(f"{folder.name} is bad and was put aside as {folder.bad.name}: {error}")


def _asked_for(run: RunDir, step: int | None, name: str | None, say: disk.Say) -> list[CheckpointDir]:
    if name is not None:
        if step_and_attempt(name) is None or name not in folder_names(run):
            raise NoCheckpointError(f"{run.checkpoints}: no checkpoint {name!r:.80}; {_there(run)}")
        return [CheckpointDir(run.checkpoints / name)]
    found = candidates(run, say=say)
    if step is None:
        return found
    return [folder for folder in found if (step_and_attempt(folder.name) or (None,))[0] == step]


def _there(run: RunDir) -> str:
    names = sorted(name for name in folder_names(run) if step_and_attempt(name))
    return f"there are {', '.join(names[-6:])}" if names else "there are none"


def _mark(folder: CheckpointDir, manifest: Manifest, say: disk.Say) -> None:
    try:
        if not is_verified(folder, manifest):
            mark_verified(folder, manifest)
    except MusterError as error:
        say(f"{folder.name} is good, but that cannot be noted: {error}")
