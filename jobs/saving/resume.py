"""The checkpoint that an attempt begins from, as whoever chose it names it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from muster.jobs.basics.errors import NoCheckpointError, RefusedError
from muster.jobs.checkpoint.choose import newest_good
from muster.jobs.checkpoint.manifest import Manifest, read_manifest
from muster.jobs.runfolder.checkpointdir import CheckpointDir
from muster.jobs.runfolder.rundir import RunDir


@dataclass(frozen=True)
class Resume:
    """The checkpoint to go on from, as who chose it says: its folder's name, the steps done, its manifest's sha256."""

    checkpoint: str
    step: int
    sha256: str

    @classmethod
    def read(cls, record: Mapping[str, Any] | None) -> "Resume | None":
        """Read it from a start's payload."""
        return None if record is None else cls(record["checkpoint"], record["step"], record["sha256"])


@dataclass(frozen=True)
class Loaded:
    """What was read, and how long it took."""

    step: int
    checkpoint: str
    seconds: float
    code: Any = None  # the user's files that it was made with, as `jobs/user/code.py` lists them


def newest(run: RunDir) -> Resume | None:
    """Choose and verify the newest good checkpoint of a run; None where there is none.

    Raises:
        StorageError: the run folder cannot be read.
    """
    chosen = newest_good(run, say=lambda line: print(line, flush=True))
    return None if chosen is None else Resume(chosen.folder.name, chosen.manifest.step, chosen.manifest.sha256)


def read_chosen(folder: CheckpointDir, resume: Resume) -> Manifest:
    """Read the manifest that was chosen.

    Raises:
        RefusedError: another checkpoint has its name now.
        NoCheckpointError, StorageError: it cannot be read.
    """
    try:
        found = read_manifest(folder)
    except FileNotFoundError as error:
        raise NoCheckpointError(f"{folder.manifest}: not there; was it deleted since it was chosen?") from error
    require_chosen(found, folder, resume)
    return found


def require_chosen(found: Manifest, folder: CheckpointDir, resume: Resume) -> None:
    """Compare the manifest that is there with the one that was chosen.

    Raises:
        RefusedError: it is another one.
    """
    if (found.sha256, found.step) != (resume.sha256, resume.step):
        again = RunDir(folder.path.parent.parent).command("resume")
        raise RefusedError(
            f"{folder.path}: its manifest has sha256 {found.sha256[:12]} and step {found.step}, chosen was one with "
            f"{resume.sha256[:12]} and step {resume.step}; choose again: {again}"
        )
