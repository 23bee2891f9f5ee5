"""Delete old checkpoints after a commit, but always keep at least two that were verified byte by byte."""

import contextlib
import shutil
import stat
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from muster.jobs.basics.errors import BadCheckpointError
from muster.jobs.checkpoint import disk
from muster.jobs.checkpoint.choose import quarantine
from muster.jobs.checkpoint.lineage import began_from, candidates, folder_names
from muster.jobs.checkpoint.manifest import read_manifest
from muster.jobs.checkpoint.names import step_and_attempt
from muster.jobs.checkpoint.verify import is_verified, mark_verified, verify
from muster.jobs.runfolder.checkpointdir import CheckpointDir
from muster.jobs.runfolder.rundir import RunDir

LEAST: Final = 2
State = Literal["verified", "committed", "unfinished", "bad", "trash"]


@dataclass(frozen=True)
class RetentionEntry:
    """A checkpoint folder in the retention plan. `abandoned`: a checkpoint that is not in the run's lineage."""

    name: str
    step: int
    attempt: int
    state: State
    abandoned: bool = False


def plan(checkpoints: Sequence[RetentionEntry], keep: int, protect: Collection[str] = ()) -> list[str]:
    """Choose the checkpoints to delete, oldest first. Pure.

    The newest `keep` verified checkpoints of the lineage (at least two) are kept. Once there are so many of them, older
    checkpoints of the lineage are deleted. Unfinished, bad and abandoned folders are deleted if they are older than the
    newest verified checkpoint, except the newest bad one, which is kept for inspection. `trash-` folders are always
    deleted. Until two checkpoints are verified, nothing else is deleted.
    """
    ordered = sorted(checkpoints, key=lambda each: (each.attempt, each.step))
    good = [each for each in ordered if each.state == "verified" and not each.abandoned]
    gone = [each.name for each in ordered if each.state == "trash"]
    evidence = [each.name for each in ordered if each.state == "bad"][-1:]
    if len(good) < LEAST:
        return gone
    kept = good[-max(keep, LEAST) :]
    oldest = (kept[0].attempt, kept[0].step) if len(kept) >= max(keep, LEAST) else (-1, -1)
    newest = (good[-1].attempt, good[-1].step)
    for each in ordered:
        place = (each.attempt, each.step)
        if each.name in protect or each.name in evidence or each.state == "trash" or each in kept:
            continue
        if place < (newest if each.state in ("unfinished", "bad") or each.abandoned else oldest):
            gone.append(each.name)
    return gone


def retain(run: RunDir, keep: int, protect: Collection[str] = (), *, say: disk.Say = lambda _: None) -> list[str]:
    """Verify the newest checkpoints, unless that was done before, then delete old ones; return the deleted names.

    The checkpoint that the newest attempt resumed from is kept as well. Only one process of a run calls this, after a
    commit.

    Raises:
        StorageError, RunFolderError: if a folder cannot be read, moved or deleted; kept checkpoints are unchanged.
    """
    entries = survey(run, keep, say=say)
    gone = plan(entries, keep, {*protect, *_beginnings(run, say=say)})
    for name in gone:
        _delete(run, name)
    return gone


def survey(run: RunDir, keep: int, *, say: disk.Say) -> list[RetentionEntry]:
    """List the checkpoint folders, and verify those that the plan depends on."""
    wanted, good = max(keep, LEAST), 0
    lineage = candidates(run, say=say)
    for folder in lineage:
        if good == wanted:
            break
        good += _is_good(folder, say)
    inside = {folder.name for folder in lineage}
    found = []
    for name in folder_names(run):
        plain = name.removeprefix("bad-").removeprefix("trash-")
        if (place := step_and_attempt(plain)) is None:
            continue
        state = _state(run, name)
        if state is not None:
            found.append(RetentionEntry(name, *place, state, state in ("verified", "committed") and name not in inside))
    return found


def _is_good(folder: CheckpointDir, say: disk.Say) -> bool:
    """Return True if a checkpoint is valid; verify it if it is not marked as verified."""
    try:
        manifest = read_manifest(folder)
        if not is_verified(folder, manifest):
            mark_verified(folder, verify(folder))
    except FileNotFoundError:
        return False
    except BadCheckpointError as error:
        quarantine(folder, error, say=say)
        return False
    return True


def _state(run: RunDir, name: str) -> State | None:
    folder = CheckpointDir(run.checkpoints / name)
    try:
        if not stat.S_ISDIR(folder.path.lstat().st_mode):
            return None  # a file or a link: Muster did not create it and does not touch it
    except FileNotFoundError:
        return None
    except OSError as error:
        raise disk.read_error(folder.path, error) from error
    if name.startswith("trash-"):
        return "trash"
    if name.startswith("bad-"):
        return "bad"
    try:
        manifest = read_manifest(folder)
        return "verified" if is_verified(folder, manifest) else "committed"
    except FileNotFoundError:
        return "unfinished"
    except BadCheckpointError:
        return None  # a checkpoint is verified before it is loaded, and renamed if it is bad


def _beginnings(run: RunDir, *, say: disk.Say) -> set[str]:
    """Return a set with the name of the checkpoint that the newest resumed attempt began with."""
    for attempt in reversed(run.attempt_numbers()):
        begun = began_from(run, attempt, say=say)
        if begun is not None:
            return {begun.name} if begun.name is not None else set()
    return set()


def _delete(run: RunDir, name: str) -> None:
    """Rename a checkpoint to `trash-...`, which is never loaded, then delete it. After a crash, `retain` deletes it."""
    trash = run.checkpoints / (name if name.startswith("trash-") else f"trash-{name.removeprefix('bad-')}")
    with disk.writing(run.checkpoints / name):
        if name != trash.name:
            with contextlib.suppress(FileNotFoundError):  # another Muster process was faster
                (run.checkpoints / name).rename(trash)
                disk.sync_folder(run.checkpoints)
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(trash)  # does not follow links
