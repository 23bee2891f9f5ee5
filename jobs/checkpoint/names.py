"""Parse the names of checkpoint folders. Only the exact form written by `jobs/runfolder/rundir.py` is accepted."""

import re
from pathlib import Path

from muster.jobs.basics.errors import BadCheckpointError
from muster.jobs.runfolder.checkpointdir import CheckpointDir
from muster.jobs.runfolder.rundir import RunDir

_NAME = re.compile(r"step-([0-9]{8,15})\.a([0-9]{3,9})")


def step_and_attempt(name: str) -> tuple[int, int] | None:
    """Return the step and the attempt in a folder name; None for any other name."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    step, attempt = int(match[1]), int(match[2])
    return (step, attempt) if RunDir(Path()).checkpoint(step, attempt).name == name else None


def position(name: str) -> tuple[int, int]:
    """Return the step and the attempt in a folder name, by which checkpoints are ordered; (0, 0) for any other name."""
    return step_and_attempt(name) or (0, 0)


def identity(folder: CheckpointDir) -> tuple[int, int]:
    """Return the step and the attempt of a checkpoint folder.

    Raises:
        BadCheckpointError: if the name does not have Muster's form.
    """
    found = step_and_attempt(folder.name)
    if found is None:
        raise BadCheckpointError(f"{folder.path}: not a checkpoint folder; expected a name like step-00000050.a000")
    return found
