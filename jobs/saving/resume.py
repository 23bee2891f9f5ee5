"""The checkpoint that an attempt begins from, as whoever chose it names it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from muster.jobs.checkpoint.choose import newest_good
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


def newest(run: RunDir) -> Resume | None:
    """Choose and verify the newest good checkpoint of a run; None where there is none.

    Raises:
        StorageError: the run folder cannot be read.
    """
    chosen = newest_good(run, say=lambda line: print(line, flush=True))
    return None if chosen is None else Resume(chosen.folder.name, chosen.manifest.step, chosen.manifest.sha256)
