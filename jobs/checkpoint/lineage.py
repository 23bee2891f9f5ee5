"""The lineage of a run: the checkpoints of its newest attempt, then those of the attempt it resumed from, and so on.

If an attempt resumed from step 400, then step 5000 of the attempt before it is an abandoned branch and is ignored.
`attempt-NNN/resume.json` records the checkpoint that an attempt resumed from. An attempt without this file has not
chosen yet, so all checkpoints of the attempt before it count.
"""

from dataclasses import dataclass
from typing import Any

from muster.jobs.basics.errors import BadCheckpointError
from muster.jobs.checkpoint import disk, sealed
from muster.jobs.checkpoint.names import step_and_attempt
from muster.jobs.runfolder.checkpointdir import CheckpointDir
from muster.jobs.runfolder.rundir import RunDir

MAX_RESUME_BYTES = 1 << 20


@dataclass(frozen=True)
class LineageAttempt:
    """An attempt of the lineage, and its last step that counts (None: all steps count)."""

    attempt: int
    up_to: int | None


def lineage(run: RunDir, *, say: disk.Say) -> list[LineageAttempt]:
    """List the attempts of the lineage, newest first.

    Raises:
        StorageError: if the run folder cannot be read.
    """
    attempts = sorted({*run.attempt_numbers(), *(attempt for _, attempt in _present(run))}, reverse=True)
    reaches: list[LineageAttempt] = []
    parent: Beginning | None = None  # the checkpoint that the last attempt with a resume.json resumed from
    for attempt in attempts:
        if parent is not None and attempt > parent.attempt:
            continue  # the checkpoint belongs to an abandoned branch
        reaches.append(LineageAttempt(attempt, None if parent is None or attempt < parent.attempt else parent.step))
        begun = began_from(run, attempt, say=say)
        if begun is not None and begun.name is None:
            break
        parent = begun
    return reaches


@dataclass(frozen=True)
class Beginning:
    """The checkpoint that an attempt resumed from; `name` is None if the attempt started from scratch."""

    name: str | None
    step: int = 0
    attempt: int = 0


def began_from(run: RunDir, attempt: int, *, say: disk.Say) -> Beginning | None:
    """Read the checkpoint that an attempt resumed from; None if there is no usable record."""
    path = run.attempt(attempt).resume
    try:
        with disk.opened_folder(path.parent) as within:
            data = disk.read_small(within, path.name, path, MAX_RESUME_BYTES)
        name: Any = sealed.parse(data, path)["checkpoint"]
    except FileNotFoundError:
        return None
    except (BadCheckpointError, KeyError) as error:
        say(f"{path} is unusable ({error}); using the attempt before it")
        return None
    if name is None:
        return Beginning(None)
    found = step_and_attempt(name) if isinstance(name, str) else None
    if found is None or found[1] >= attempt:
        say(f"{path} names no earlier checkpoint ({name!r:.80}); using the attempt before it")
        return None
    return Beginning(name, *found)


def candidates(run: RunDir, *, say: disk.Say) -> list[CheckpointDir]:
    """List the checkpoint folders of the lineage, committed or not, in the order in which to try them."""
    present = _present(run)
    found = []
    for reach in lineage(run, say=say):
        steps = [step for step, attempt in present if attempt == reach.attempt]
        steps = [step for step in steps if reach.up_to is None or step <= reach.up_to]
        found += [run.checkpoint(step, reach.attempt) for step in sorted(steps, reverse=True)]
    return found


def folder_names(run: RunDir) -> set[str]:
    """List the names in the checkpoint folder; empty if it does not exist.

    Raises:
        BadCheckpointError: if the checkpoint folder is a link or not a folder.
        StorageError: if the checkpoint folder cannot be read.
    """
    try:
        with disk.opened_folder(run.checkpoints) as within:
            return disk.names_in(within, run.checkpoints)
    except FileNotFoundError:
        return set()


def _present(run: RunDir) -> list[tuple[int, int]]:
    found = map(step_and_attempt, folder_names(run))
    return [each for each in found if each is not None]
