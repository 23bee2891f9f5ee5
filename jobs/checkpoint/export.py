"""Export a checkpoint as one safetensors file that plain PyTorch loads."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from muster.jobs.basics.errors import BadCheckpointError, NoCheckpointError
from muster.jobs.checkpoint import disk
from muster.jobs.checkpoint.layout import header_of
from muster.jobs.checkpoint.manifest import CheckpointManifest
from muster.jobs.checkpoint.pieces import Piece
from muster.jobs.checkpoint.read import CheckpointReader
from muster.jobs.runfolder.checkpointdir import CheckpointDir

PREFIX: Final = "model/"
CHUNK_BYTES: Final = 16 << 20


def export(folder: CheckpointDir, manifest: CheckpointManifest, path: Path) -> int:
    """Write parameters and buffers, assembled from all shards, into one file; return the number of names in it.

    Raises:
        NoCheckpointError: if the checkpoint has no parameters and buffers.
        BadCheckpointError: if a shard is missing or truncated.
        StorageError, RunFolderError: if the file cannot be written; no partial file is left behind.
    """
    pieces = [manifest.piece(name) for name in sorted(manifest.tensors) if name.startswith(PREFIX)]
    if not pieces:
        raise NoCheckpointError(f"{folder.path}: has no parameters or buffers ({PREFIX}...) to export")
    entries = [(piece.name.removeprefix(PREFIX), piece) for piece in pieces]
    entries += [(name, manifest.piece(PREFIX + of)) for name, of in aliases(manifest).items()]
    entries.sort(key=lambda entry: -entry[1].item_bytes)  # wide elements first, so that each tensor is aligned
    pieces = [piece for _, piece in entries]
    metadata = {"format": "pt", "step": str(manifest.step)}  # no time, no path: equal weights give equal files
    header, _ = header_of(entries, metadata)
    size = len(header) + sum(piece.nbytes for piece in pieces)
    with CheckpointReader(folder, manifest) as reader:
        disk.write_file(path.parent, path.name, _chunks(header, reader, pieces), reserve=size)
    return len(pieces)


def aliases(manifest: CheckpointManifest) -> dict[str, str]:
    """Return the second names of tied tensors, as {second name: saved name}.

    A model that ties its head to its embedding has one tensor with two names. Plain PyTorch needs both names to load
    it.

    Raises:
        BadCheckpointError: if an alias refers to no tensor, or is itself the name of a tensor.
    """
    recorded = manifest.meta.get("aliases", {})
    if not isinstance(recorded, dict):
        raise BadCheckpointError(f"step {manifest.step}: meta.aliases is {type(recorded).__name__}, expected an object")
    for name, of in recorded.items():
        if not isinstance(of, str) or PREFIX + of not in manifest.tensors or PREFIX + name in manifest.tensors:
            raise BadCheckpointError(f"step {manifest.step}: meta.aliases: {name!r} cannot be an alias of {of!r}")
    return recorded


def _chunks(header: bytes, reader: CheckpointReader, pieces: list[Piece]) -> Iterator[memoryview]:
    yield memoryview(header)
    buffer = memoryview(bytearray(CHUNK_BYTES))
    for piece in pieces:
        step = CHUNK_BYTES // piece.item_bytes
        for start in range(0, piece.elements, step):
            stop = min(start + step, piece.elements)
            part = buffer[: (stop - start) * piece.item_bytes]
            reader.read_into(Piece(piece.name, piece.dtype, piece.shape, flat=(start, stop)), part)
            yield part
