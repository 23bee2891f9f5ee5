"""The checkpoint that an attempt resumes from, as passed from the process that chose it to the ranks."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from muster.jobs.basics.errors import NoCheckpointError, RefusedError
from muster.jobs.checkpoint.choose import newest_good
from muster.jobs.checkpoint.manifest import CheckpointManifest, read_manifest
from muster.jobs.runfolder.checkpointdir import CheckpointDir
from muster.jobs.runfolder.rundir import RunDir


@dataclass(frozen=True)
class Resume:
    """The checkpoint to resume from: the name of its folder, its step, and the SHA-256 of its manifest.

    `memory`: it is in the memory of the nodes (`jobs/saving/memory.py`), not in the run folder.
    """

    checkpoint: str
    step: int
    sha256: str
    memory: bool = False

    @classmethod
    def read(cls, record: Mapping[str, Any] | None) -> "Resume | None":
        """Read the checkpoint to resume from, as given in the payload of the start message."""
        if record is None:
            return None
        return cls(record["checkpoint"], record["step"], record["sha256"], record.get("memory", False))


@dataclass(frozen=True)
class LoadedCheckpoint:
    """The checkpoint that was loaded, and how long loading took."""

    step: int
    checkpoint: str
    seconds: float
    code: Any = None  # the user's files when the checkpoint was saved, as `jobs/user/code.py` lists them


def newest(run: RunDir) -> Resume | None:
    """Choose and verify the newest valid checkpoint of a run; None if there is none.

    Raises:
        StorageError: if the run folder cannot be read.
    """
    chosen = newest_good(run, say=lambda line: print(line, flush=True))
    return None if chosen is None else Resume(chosen.folder.name, chosen.manifest.step, chosen.manifest.sha256)


def read_chosen(folder: CheckpointDir, resume: Resume) -> CheckpointManifest:
    """Read the manifest of the chosen checkpoint.

    Raises:
        RefusedError: if the folder now contains another checkpoint.
        NoCheckpointError, StorageError: if it cannot be read.
    """
    try:
        found = read_manifest(folder)
    except FileNotFoundError as error:
        raise NoCheckpointError(f"{folder.manifest}: does not exist; was it deleted after it was chosen?") from error
    require_chosen(found, folder, resume)
    return found


def require_chosen(found: CheckpointManifest, folder: CheckpointDir, resume: Resume) -> None:
    """Check that a manifest is the chosen one.

    Raises:
        RefusedError: if its digest or step differs.
    """
    if (found.sha256, found.step) != (resume.sha256, resume.step):
        again = RunDir(folder.path.parent.parent).command("resume")
        raise RefusedError(
            f"{folder.path}: its manifest has sha256 {found.sha256[:12]} and step {found.step}, but the chosen one had "
            f"{resume.sha256[:12]} and step {resume.step}; choose again: {again}"
        )
