"""A checkpoint as one safetensors file of plain names, which plain PyTorch loads."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from muster.jobs.basics.errors import BadCheckpointError, NoCheckpointError
from muster.jobs.checkpoint import disk
from muster.jobs.checkpoint.layout import header_of
from muster.jobs.checkpoint.manifest import Manifest
from muster.jobs.checkpoint.pieces import Piece
from muster.jobs.checkpoint.read import Reader
from muster.jobs.runfolder.checkpointdir import CheckpointDir

PREFIX: Final = "model/"
CHUNK_BYTES: Final = 16 << 20


def export(folder: CheckpointDir, manifest: Manifest, path: Path) -> int:
    """Write parameters and buffers into one file, put together from all shards; return how many names it has.

    Raises:
        NoCheckpointError: the checkpoint holds none.
        BadCheckpointError: a shard is gone, or ends too early.
        StorageError, RunFolderError: the file cannot be written; nothing is left of it.
    """
    pieces = [manifest.piece(name) for name in sorted(manifest.tensors) if name.startswith(PREFIX)]
    if not pieces:
        raise NoCheckpointError(f"{folder.path}: it holds no parameters and buffers ({PREFIX}...) to export")
    entries = [(piece.name.removeprefix(PREFIX), piece) for piece in pieces]
    entries += [(name, manifest.piece(PREFIX + of)) for name, of in aliases(manifest).items()]
    entries.sort(key=lambda entry: -entry[1].item_bytes)  # wide elements first, so that each is aligned
    pieces = [piece for _, piece in entries]
    metadata = {"format": "pt", "step": str(manifest.step)}  # equal weights make equal files
    header, _ = header_of(entries, metadata)
    size = len(header) + sum(piece.nbytes for piece in pieces)
    with Reader(folder, manifest) as reader:
        disk.write_file(path.parent, path.name, _chunks(header, reader, pieces), reserve=size)
    return len(pieces)


def aliases(manifest: Manifest) -> dict[str, str]:
    """Return the other names of tied tensors, {name: the name that it is saved under}, as the manifest has them.

    A model whose head is its embedding has one tensor and two names; plain PyTorch wants both when it loads.

    Raises:
        BadCheckpointError: a name stands for no tensor, or for two.
    """
    told = manifest.meta.get("aliases", {})
    if not isinstance(told, dict):
        raise BadCheckpointError(f"step {manifest.step}: meta.aliases is {type(told).__name__}, and must be an object")
    for name, of in told.items():
        if not isinstance(of, str) or PREFIX + of not in manifest.tensors or PREFIX + name in manifest.tensors:
            raise BadCheckpointError(f"step {manifest.step}: meta.aliases: {name!r} cannot be another name of {of!r}")
    return told


def _chunks(header: bytes, reader: Reader, pieces: list[Piece]) -> Iterator[memoryview]:
    yield memoryview(header)
    buffer = memoryview(bytearray(CHUNK_BYTES))
    for piece in pieces:
        step = CHUNK_BYTES // piece.item_bytes
        for start in range(0, piece.elements, step):
            stop = min(start + step, piece.elements)
            part = buffer[: (stop - start) * piece.item_bytes]
            reader.read_into(Piece(piece.name, piece.dtype, piece.shape, flat=(start, stop)), part)
            yield part
