"""What a run has made in the end: every tensor of its last checkpoint, to be compared with the uninterrupted run's."""

import hashlib
from array import array
from collections.abc import Mapping

from muster.jobs.basics.errors import MusterError
from muster.jobs.checkpoint.manifest import CheckpointManifest
from muster.jobs.checkpoint.read import CheckpointReader
from muster.jobs.checkpoint.verify import verify
from muster.jobs.runfolder.checkpointdir import CheckpointDir
from muster.jobs.runfolder.rundir import RunDir


class NoStateError(Exception):
    """A run has no checkpoint that could be compared."""


def contents(folder: CheckpointDir, manifest: CheckpointManifest) -> dict[str, bytes]:
    """Return the bytes of every tensor of a checkpoint."""
    found = {}
    with CheckpointReader(folder, manifest) as reader:
        for name in reader.names():
            piece = reader.piece(name)
            buffer = bytearray(piece.nbytes)
            reader.read_into(piece, buffer)
            found[name] = bytes(buffer)
    return found


def last_checkpoint(run: RunDir) -> CheckpointDir:
    """Return the committed checkpoint of the most steps, of those the newest attempt's.

    Raises:
        NoStateError: there is none.
    """
    found = [each.parent for each in run.checkpoints.glob("step-*/MANIFEST.json")]
    if not found:
        raise NoStateError(f"{run.checkpoints}: no committed checkpoint")
    return CheckpointDir(max(found, key=lambda path: path.name))


def tensors(run: RunDir) -> dict[str, bytes]:
    """Return the bytes of every tensor of the last checkpoint, parameters and optimizer state, after a deep check.

    Raises:
        NoStateError: there is none, or it is broken.
    """
    folder = last_checkpoint(run)
    try:
        return contents(folder, verify(folder))
    except MusterError as error:
        raise NoStateError(str(error)) from error


def last_step(run: RunDir) -> int:
    """Return the steps of the last checkpoint."""
    return int(last_checkpoint(run).name.removeprefix("step-").partition(".")[0])


def digest(found: Mapping[str, bytes]) -> str:
    """Return one sha256 over all tensors, names included."""
    whole = hashlib.sha256()
    for name in sorted(found):
        whole.update(name.encode() + b"\0" + len(found[name]).to_bytes(8, "little") + found[name])
    return whole.hexdigest()


def largest_difference(mine: Mapping[str, bytes], theirs: Mapping[str, bytes]) -> float:
    """Return the largest difference of two runs in float64, relative to 1 or to the value where that is larger.

    Raises:
        NoStateError: they have not the same tensors.
    """
    if mine.keys() != theirs.keys():
        raise NoStateError(f"tensors differ: {sorted(mine.keys() ^ theirs.keys())[:3]}")
    worst = 0.0
    for name, data in mine.items():
        if name.endswith("/step"):  # a count, in float32
            worst = max(worst, 0.0 if data == theirs[name] else float("inf"))
            continue
        for one, other in zip(array("d", data), array("d", theirs[name]), strict=True):
            worst = max(worst, abs(one - other) / max(1.0, abs(other)))
    return worst
