"""Choose the checkpoint for the next attempt: the newest valid one in the run's lineage."""

from dataclasses import dataclass
from pathlib import Path

from muster.jobs.basics.errors import BadCheckpointError, MusterError, NoCheckpointError, StorageError
from muster.jobs.checkpoint import disk
from muster.jobs.checkpoint.commit import roll_forward
from muster.jobs.checkpoint.lineage import candidates, folder_names
from muster.jobs.checkpoint.manifest import CheckpointManifest
from muster.jobs.checkpoint.names import step_and_attempt
from muster.jobs.checkpoint.verify import is_verified, mark_verified, verify
from muster.jobs.runfolder.checkpointdir import CheckpointDir
from muster.jobs.runfolder.rundir import RunDir


@dataclass(frozen=True)
class Chosen:
    """A verified checkpoint. All its bytes were checked, unless the check was shallow."""

    folder: CheckpointDir
    manifest: CheckpointManifest


def newest_good(
    run: RunDir,
    *,
    say: disk.Say = lambda _: None,
    step: int | None = None,
    name: str | None = None,
    deep: bool = True,
    mark: bool = True,
) -> Chosen | None:
    """Choose the checkpoint to continue from; None if the run has no valid one.

    First, checkpoints that all writers have saved are committed. Then the candidates of the lineage are verified in
    turn, until one is valid. A bad candidate is renamed to `bad-...` and reported in one line. A candidate that cannot
    be read at the moment is reported and stays unchanged.

    Args:
        step: choose the newest checkpoint of this step in the lineage.
        name: choose exactly this folder.

    Raises:
        NoCheckpointError: if there is no valid checkpoint of `step`, or no committed checkpoint `name`.
        BadCheckpointError: if the checkpoint `name` is bad, or the checkpoint folder is a link.
        StorageError: if the checkpoint folder cannot be read.
    """
    try:
        roll_forward(run, say=say)
    except MusterError as error:  # a full disk must not hide committed checkpoints
        say(f"cannot commit pending checkpoints: {error}")
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
            say(f"{folder.name} cannot be read at the moment and was not changed: {error}")
            continue
        if mark and deep:
            _mark(folder, manifest, say)
        return Chosen(folder, manifest)
    if step is not None:
        raise NoCheckpointError(f"{run.checkpoints}: no good checkpoint of step {step}; {_there(run)}")
    return None


def has_commits(run: RunDir) -> bool:
    """Return True if a run has committed checkpoints: valid, bad or unreadable. Unfinished saves do not count.

    Raises:
        BadCheckpointError: if the checkpoint folder is a link.
        StorageError: if the checkpoint folder cannot be read.
    """
    return any(
        name.startswith("bad-") or (step_and_attempt(name) is not None and _is_committed(run.checkpoints / name))
        for name in folder_names(run)
    )


def newest_step(run: RunDir) -> int:
    """Return the step of a run's newest committed checkpoint, which may be damaged; 0 if there is none."""
    found = (step_and_attempt(path.name) for path in run.checkpoints.glob("step-*") if _is_committed(path))
    return max((each[0] for each in found if each is not None), default=0)


def _is_committed(path: Path) -> bool:
    try:
        CheckpointDir(path).manifest.lstat()
    except FileNotFoundError:
        return False
    except OSError:  # count the folder, because its checkpoint may be committed
        return True
    return True


def quarantine(folder: CheckpointDir, error: BadCheckpointError, *, say: disk.Say) -> None:
    """Rename a bad checkpoint, so that it is not tried again but can still be inspected."""
    try:
        folder.path.rename(folder.bad)
        disk.sync_folder(folder.path.parent)
    except (OSError, MusterError) as problem:
        say(f"{folder.name} is bad ({error}); it could not be renamed: {problem}")
    else:
        say(f"{folder.name} is bad and was renamed to {folder.bad.name}: {error}")


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
    return f"the run has {', '.join(names[-6:])}" if names else "the run has none"


def _mark(folder: CheckpointDir, manifest: CheckpointManifest, say: disk.Say) -> None:
    try:
        if not is_verified(folder, manifest):
            mark_verified(folder, manifest)
    except MusterError as error:
        say(f"{folder.name} is valid, but could not be marked as verified: {error}")
