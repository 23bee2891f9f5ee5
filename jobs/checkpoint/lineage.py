"""Which checkpoints a run stands on: those of its newest attempt, then what that one began from, and so on back.

An attempt that began from step 400 leaves a step 5000 of the one before behind it: that branch was given up, and its
higher number never wins. `attempt-NNN/resume.json` says what an attempt began from. An attempt without one has decided
nothing yet, and the one before it stands.
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
class Reach:
    """An attempt that the run stands on, and the last of its steps that still counts; None: all of them."""

    attempt: int
    up_to: int | None


def lineage(run: RunDir, *, say: disk.Say) -> list[Reach]:
    """List the attempts that a run stands on, newest first.

    Raises:
        StorageError: the run folder cannot be read.
    """
    attempts = sorted({*run.attempt_numbers(), *(attempt for _, attempt in _present(run))}, reverse=True)
    reaches: list[Reach] = []
    parent: Beginning | None = None  # what the last attempt that said so began from
    for attempt in attempts:
        if parent is not None and attempt > parent.attempt:
            continue  # a branch that was given up
        reaches.append(Reach(attempt, None if parent is None or attempt < parent.attempt else parent.step))
        begun = began_from(run, attempt, say=say)
        if begun is not None and begun.name is None:
            break
        parent = begun
    return reaches


@dataclass(frozen=True)
class Beginning:
    """What an attempt began from: a checkpoint's name, or None for the beginning of the training."""

    name: str | None
    step: int = 0
    attempt: int = 0


def began_from(run: RunDir, attempt: int, *, say: disk.Say) -> Beginning | None:
    """Read what an attempt began from; None when it has not said, or not in words that can be understood."""
    path = run.attempt(attempt).resume
    try:
        with disk.opened_folder(path.parent) as within:
            data = disk.read_small(within, path.name, path, MAX_RESUME_BYTES)
        name: Any = sealed.parse(data, path)["checkpoint"]
    except FileNotFoundError:
        return None
    except (BadCheckpointError, KeyError) as error:
        say(f"{path} says nothing of use ({error}); going by the attempt before it")
        return None
    if name is None:
        return Beginning(None)
    found = step_and_attempt(name) if isinstance(name, str) else None
    if found is None or found[1] >= attempt:
        say(f"{path} names no earlier checkpoint ({name!r:.80}); going by the attempt before it")
        return None
    return Beginning(name, *found)


def candidates(run: RunDir, *, say: disk.Say) -> list[CheckpointDir]:
    """List the checkpoint folders of a run's lineage, the one to try first at the front, committed or not."""
    present = _present(run)
    found = []
    for reach in lineage(run, say=say):
        steps = [step for step, attempt in present if attempt == reach.attempt]
        steps = [step for step in steps if reach.up_to is None or step <= reach.up_to]
        found += [run.checkpoint(step, reach.attempt) for step in sorted(steps, reverse=True)]
    return found


def folder_names(run: RunDir) -> set[str]:
    """List the names in the folder of checkpoints; none when it is not there.

    Raises:
        BadCheckpointError: the folder of checkpoints is a link, or no folder.
        StorageError: it cannot be read.
    """
    try:
        with disk.opened_folder(run.checkpoints) as within:
            return disk.names_in(within, run.checkpoints)
    except FileNotFoundError:
        return set()


def _present(run: RunDir) -> list[tuple[int, int]]:
    found = map(step_and_attempt, folder_names(run))
    return [each for each in found if each is not None]
