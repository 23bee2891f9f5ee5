"""Read a checkpoint into tensors: all ranks read the same one, each rank its own parts."""

import ctypes
from typing import Any, Final

import torch
from torch import Tensor

from muster.jobs.basics.errors import MusterError, NoCheckpointError, RefusedError
from muster.jobs.checkpoint.manifest import CheckpointManifest, read_manifest
from muster.jobs.checkpoint.read import CheckpointReader
from muster.jobs.runfolder.checkpointdir import CheckpointDir
from muster.jobs.saving.resume import Resume, require_chosen
from muster.jobs.tensors.parts import TensorPart
from muster.jobs.world.world import World, require_equal

PATIENCE_S: Final = 3.0  # how long this node's view of shared storage may lag behind the commit
NO_DIGEST: Final = "00" * 32


def same_manifest(folder: CheckpointDir, resume: Resume, world: World) -> CheckpointManifest:
    """Read the manifest of the chosen checkpoint. This is a collective: if one rank cannot read it, all ranks raise.

    Raises:
        RefusedError: if ranks read different manifests, or not the chosen one.
        NoCheckpointError, StorageError: if this rank cannot read it.
    """
    found: CheckpointManifest | None = None
    problem: MusterError | None = None
    try:
        found = read_manifest(folder, patience_s=PATIENCE_S)
    except FileNotFoundError:
        problem = NoCheckpointError(f"{folder.manifest}: does not exist; is the run folder the same on every node?")
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
    require_chosen(found, folder, resume)
    return found


def fill(part: TensorPart, reader: CheckpointReader) -> None:
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
    """Return the memory of a contiguous CPU tensor as a writable buffer."""
    size = tensor.numel() * tensor.element_size()
    return (ctypes.c_char * size).from_address(tensor.data_ptr()) if size else bytearray()
