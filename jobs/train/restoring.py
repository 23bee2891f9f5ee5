"""Going on from a checkpoint: every rank reads the same one, refuses what is not this job's, and fills its state.

There is no random state and no place in the data to restore: every draw is keyed by the step it is for, so the number
of steps done says it all.
"""

import ctypes
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from muster.jobs.basics.errors import MusterError, NoCheckpointError, RefusedError
from muster.jobs.checkpoint.manifest import Manifest, read_manifest
from muster.jobs.checkpoint.read import Reader
from muster.jobs.node import page
from muster.jobs.node.page import Phase
from muster.jobs.runfolder.checkpointdir import CheckpointDir
from muster.jobs.runfolder.rundir import RunDir
from muster.jobs.spec.kept import KEPT, require_kept
from muster.jobs.train.engine import Engine
from muster.jobs.train.loading import ShardInput
from muster.jobs.train.state import Part
from muster.jobs.world.world import World, require_equal

PATIENCE_S: Final = 3.0  # with a view of shared storage that is older than the commit
NO_DIGEST: Final = "00" * 32


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


def restore(
    run: RunDir,
    resume: Resume,
    engine: Engine,
    world: World,
    kept: Mapping[str, Any],
    first_shards: Sequence[ShardInput],
) -> Loaded:
    """Fill an engine with a checkpoint's state: a collective.

    Raises:
        RefusedError: the ranks do not see the same checkpoint, or it is of another job.
        NoCheckpointError, StorageError: it cannot be read.
    """
    page.own.enter(Phase.LOAD)
    began_s = time.monotonic()
    folder = CheckpointDir(run.checkpoints / resume.checkpoint)
    manifest = same_manifest(folder, resume, world)
    require_kept(manifest.meta.get(KEPT), kept, str(folder.path))
    engine.rehearse(first_shards)
    parts = engine.wanted_state({name: manifest.piece(name) for name in manifest.tensors})
    with Reader(folder, manifest, patience_s=PATIENCE_S) as reader:
        for part in parts:
            fill(part, reader)
            page.own.beat()
    engine.refresh()
    return Loaded(manifest.step, folder.name, time.monotonic() - began_s)


def same_manifest(folder: CheckpointDir, resume: Resume, world: World) -> Manifest:
    """Read the manifest that was chosen: a collective, so that a rank that cannot is no riddle to the others.

    Raises:
        RefusedError: ranks see different ones, or another one than was chosen.
        NoCheckpointError, StorageError: this rank cannot read it.
    """
    found: Manifest | None = None
    problem: MusterError | None = None
    try:
        found = read_manifest(folder, patience_s=PATIENCE_S)
    except FileNotFoundError:
        problem = NoCheckpointError(f"{folder.manifest}: not there; is the run folder the same on every node?")
    except MusterError as error:
        problem = error
    hint = "every rank must be given the same checkpoint, and see the same run folder"
    chosen = f"the chosen checkpoint, {resume.checkpoint} {resume.sha256[:12]},"
    require_equal(world, chosen, resume.sha256, hint)
    digest = NO_DIGEST if found is None else found.sha256
    try:
        require_equal(world, f"the checkpoint {folder.name}", digest, hint)
    except RefusedError as error:
        raise (problem or error) from error
    if found is None:
        assert problem is not None
        raise problem
    if (found.sha256, found.step) != (resume.sha256, resume.step):
        again = RunDir(folder.path.parent.parent).command("resume")
        raise RefusedError(
            f"{folder.path}: its manifest has sha256 {found.sha256[:12]} and step {found.step}, chosen was one with "
            f"{resume.sha256[:12]} and step {resume.step}; choose again: {again}"
        )
    return found


def fill(part: Part, reader: Reader) -> None:
    """Read a part into its tensor."""
    tensor = part.tensor
    if tensor.device.type == "cpu" and tensor.is_contiguous():
        reader.read_into(part.piece, writable(tensor))
        return
    room = torch.empty(part.piece.extent, dtype=tensor.dtype)
    reader.read_into(part.piece, writable(room))
    with torch.no_grad():
        tensor.copy_(room)


def writable(tensor: Tensor) -> Any:
    """Return a contiguous CPU tensor's memory as a buffer."""
    size = tensor.numel() * tensor.element_size()
    return (ctypes.c_char * size).from_address(tensor.data_ptr()) if size else bytearray()
