"""A shard: the safetensors file of one writer, and the `.ok` file that marks it as complete."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from muster.jobs.basics.errors import BadCheckpointError, RunFolderError
from muster.jobs.checkpoint import disk, sealed
from muster.jobs.checkpoint.layout import StoredPart, as_tuple, header_of
from muster.jobs.checkpoint.names import identity
from muster.jobs.checkpoint.pieces import Piece
from muster.jobs.runfolder.checkpointdir import CheckpointDir

if TYPE_CHECKING:
    from typing_extensions import Buffer

CHUNK_BYTES: Final = 4 << 20
MAX_WRITERS: Final = 100_000
_KEYS: Final = {"file", "bytes", "sha256", "step", "attempt", "writer", "writers", "tensors", "meta"}


@dataclass(frozen=True)
class ShardRecord:
    """The record of a written shard, stored in its `.ok`. `meta` of writer 0 is the JSON for the whole checkpoint."""

    file: str
    bytes: int
    sha256: str
    step: int
    attempt: int
    writer: int
    writers: int
    parts: tuple[StoredPart, ...]
    meta: Mapping[str, Any] | None = None

    def record(self) -> dict[str, Any]:
        """Return the record as JSON."""
        return {
            **{key: getattr(self, key) for key in _KEYS - {"tensors"}},
            "tensors": [
                {"name": each.piece.name, "dtype": each.piece.dtype, "shape": each.piece.shape, **each.range_record}
                for each in self.parts
            ],
        }


def write_shard(
    folder: CheckpointDir,
    writer: int,
    writers: int,
    pieces: Sequence[tuple[Piece, "Buffer"]],
    *,
    meta: Mapping[str, Any] | None = None,
) -> ShardRecord:
    """Write the shard of one writer, then its `.ok`. Both files are durable when this function returns.

    Empty pieces of nonempty tensors are skipped. Existing files are never overwritten.

    Raises:
        StorageError: if the disk is full or failing; at worst, a complete shard without `.ok` is left behind.
        RunFolderError: if the folder cannot be written, or this writer has already written.
        ValueError: if a buffer does not fit its piece, or a piece is given twice.
    """
    step, attempt = identity(folder)
    if not 0 <= writer < writers <= MAX_WRITERS:
        raise ValueError(f"writer {writer} is not one of {writers}")
    path, ok = folder.shard(writer), folder.ok(writer)
    with disk.writing(folder.path):
        there = [each for each in (path, ok) if disk.is_there(folder.path, each.name)]
    if there:
        raise RunFolderError(f"{there[0]}: exists already and is never overwritten; save under a new attempt")
    kept = [(piece, _bytes_of(piece, data)) for piece, data in pieces if piece.elements or not piece.tensor_elements]
    kept.sort(key=lambda each: -each[0].item_bytes)  # stable: wide elements first, so that each tensor is aligned
    ordered = [piece for piece, _ in kept]
    metadata = {"format": "pt", "step": str(step), "attempt": str(attempt), "parts": _parts_text(ordered)}
    header, offsets = header_of([(piece.key, piece) for piece in ordered], metadata)
    size = len(header) + sum(piece.nbytes for piece in ordered)
    digest = hashlib.sha256()

    def chunks() -> Iterator[memoryview]:
        for data in (memoryview(header), *(data for _, data in kept)):
            for start in range(0, len(data), CHUNK_BYTES):
                chunk = data[start : start + CHUNK_BYTES]
                digest.update(chunk)
                yield chunk

    disk.write_file(folder.path, path.name, chunks(), reserve=size)
    parts = tuple(StoredPart(piece, writer, offset) for piece, offset in zip(ordered, offsets, strict=True))
    record = ShardRecord(path.name, size, digest.hexdigest(), step, attempt, writer, writers, parts, meta)
    disk.write_file(folder.path, ok.name, [sealed.seal(record.record())])
    return record


def read_ok(folder: CheckpointDir, within: int, writer: int) -> ShardRecord:
    """Read the `.ok` of a writer from the open folder `within`.

    Raises:
        FileNotFoundError: if the `.ok` does not exist yet.
        BadCheckpointError: if the `.ok` is damaged or describes another shard.
        StorageError: if the `.ok` cannot be read.
    """
    path = folder.ok(writer)
    return parse_ok(folder, writer, disk.read_small(within, path.name, path, sealed.MAX_BYTES))


def parse_ok(folder: CheckpointDir, writer: int, data: bytes) -> ShardRecord:
    """Parse the bytes of the `.ok` of a writer.

    Raises:
        BadCheckpointError: as for `read_ok`.
    """
    path = folder.ok(writer)
    body = sealed.unseal(data, path)
    if body.keys() != _KEYS:
        raise BadCheckpointError(f"{path}: expected the keys {', '.join(sorted(_KEYS))}")
    step, attempt = identity(folder)
    wanted = {"file": folder.shard(writer).name, "step": step, "attempt": attempt, "writer": writer}
    for key, value in wanted.items():
        if body[key] != value or type(body[key]) is not type(value):
            raise BadCheckpointError(f"{path}: {key} is {body[key]!r:.60}, expected {value!r}")
    size, writers, meta = body["bytes"], body["writers"], body["meta"]
    if type(size) is not int or type(writers) is not int or not writer < writers <= MAX_WRITERS:
        raise BadCheckpointError(f"{path}: bytes or writers are not valid numbers")
    if not isinstance(meta, dict) and (meta is not None or writer == 0):
        raise BadCheckpointError(f"{path}: meta must be an object")
    if not isinstance(body["sha256"], str) or not isinstance(body["tensors"], list):
        raise BadCheckpointError(f"{path}: sha256 must be a string, and tensors a list")
    parts = tuple(_part(each, writer, path) for each in body["tensors"])
    return ShardRecord(body["file"], size, body["sha256"], step, attempt, writer, writers, parts, meta)


def read_part(record: Any, name: Any, dtype: Any, shape: Any, writer: int, where: object) -> StoredPart:
    """Parse the record of a stored piece.

    Raises:
        BadCheckpointError: if a value in the record is invalid.
    """
    try:
        box = record.get("box")
        ranges = None if box is None else tuple(as_tuple(each) for each in as_tuple(box))
        flat = None if record.get("flat") is None else as_tuple(record["flat"])
        piece = Piece(name, dtype, as_tuple(shape), ranges, flat)  # checks its arguments
    except ValueError as error:
        raise BadCheckpointError(f"{where}: {error!s:.200}") from error
    offset = record.get("offset")
    if type(offset) is not int or offset < 0:
        raise BadCheckpointError(f"{where}: {piece.name:.80}: the offset must be a whole number, got {offset!r:.40}")
    return StoredPart(piece, writer, offset)


def _part(record: Any, writer: int, where: object) -> StoredPart:
    if not isinstance(record, dict) or not record.keys() <= {"name", "dtype", "shape", "offset", "box", "flat"}:
        raise BadCheckpointError(f"{where}: each tensor must have name, dtype, shape, offset, and box or flat")
    return read_part(record, record.get("name"), record.get("dtype"), record.get("shape"), writer, where)


def _bytes_of(piece: Piece, data: "Buffer") -> memoryview:
    view = memoryview(data)
    if not view.c_contiguous:
        raise ValueError(f"{piece.key}: its buffer is not contiguous")
    if view.nbytes != piece.nbytes:
        raise ValueError(f"{piece.key}: its buffer has {view.nbytes} bytes, expected {piece.nbytes}")
    return view.cast("B") if view.nbytes else memoryview(b"")


def _parts_text(pieces: Sequence[Piece]) -> str:
    """Return name, global shape and range of each partial tensor as JSON, so that the file describes itself."""
    partial = {
        piece.key: {"name": piece.name, "shape": piece.shape, "box": piece.box, "flat": piece.flat}
        for piece in pieces
        if not piece.is_whole
    }
    return json.dumps(partial, separators=(",", ":"))
