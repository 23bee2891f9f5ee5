"""The safetensors layout: eight bytes of header length, a JSON header, raw bytes. Any safetensors library can read it.

    {"__metadata__": {str: str}, "name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...}

The header is padded with spaces to a multiple of eight bytes. Tensors with wide elements come first, so that each is
aligned. Reading checks that every byte after the header belongs to exactly one tensor.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from muster.jobs.basics.errors import BadCheckpointError
from muster.jobs.checkpoint import sealed
from muster.jobs.checkpoint.disk import pread
from muster.jobs.checkpoint.pieces import Piece

LENGTH_BYTES: Final = 8
MAX_HEADER_BYTES: Final = 100_000_000
METADATA: Final = "__metadata__"


@dataclass(frozen=True)
class StoredPart:
    """A stored piece: its writer, which determines the shard, and its offset in that shard."""

    piece: Piece
    writer: int
    offset: int

    @property
    def end(self) -> int:
        """The offset of the piece's end in the file."""
        return self.offset + self.piece.nbytes

    @property
    def range_record(self) -> dict[str, Any]:
        """The piece's offset and range as JSON. A record without a range is a whole tensor."""
        record: dict[str, Any] = {"offset": self.offset}
        if self.piece.is_whole:
            return record
        if self.piece.flat is not None:
            return {**record, "flat": list(self.piece.flat)}
        return {**record, "box": [list(each) for each in self.piece.box or ()]}


@dataclass(frozen=True)
class ShardHeader:
    """The header of a file; `tensors` maps a key to dtype, shape, first byte and end byte in the file."""

    tensors: Mapping[str, tuple[str, tuple[int, ...], int, int]]
    metadata: Mapping[str, str]


def header_of(pieces: Sequence[tuple[str, Piece]], metadata: Mapping[str, str]) -> tuple[bytes, list[int]]:
    """Return the header, preceded by its length, and the offset of each piece in the file. The pieces keep their order.

    Raises:
        ValueError: if two pieces have the same key, or the header is too large.
    """
    entries: dict[str, Any] = {METADATA: dict(metadata)}
    ends = [0]
    for key, piece in pieces:
        if key in entries:
            raise ValueError(f"{key}: given twice")
        ends.append(ends[-1] + piece.nbytes)
        entries[key] = {"dtype": piece.dtype, "shape": list(piece.extent), "data_offsets": ends[-2:]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=True).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(f"the header has {len(text)} bytes, expected at most {MAX_HEADER_BYTES}; use more writers")
    begin = LENGTH_BYTES + len(text)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text, [begin + start for start in ends[:-1]]


def read_header(descriptor: int, size: int, where: object) -> ShardHeader:
    """Read and check the header of a file of `size` bytes.

    Raises:
        BadCheckpointError: if a safetensors library would reject the header, or the header does not match the file.
        StorageError: if the file cannot be read.
    """
    if size < LENGTH_BYTES:
        raise BadCheckpointError(f"{where}: {size} bytes are too few for a header")
    length = int.from_bytes(pread(descriptor, LENGTH_BYTES, 0, where), "little")
    if length > min(MAX_HEADER_BYTES, size - LENGTH_BYTES):
        raise BadCheckpointError(f"{where}: a header of {length} bytes exceeds the file or the limit")
    entries = sealed.parse(pread(descriptor, length, LENGTH_BYTES, where), where, max_bytes=MAX_HEADER_BYTES)
    metadata = entries.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise BadCheckpointError(f"{where}: its metadata must map names to strings")
    tensors = {key: _entry(key, value, LENGTH_BYTES + length, where) for key, value in entries.items()}
    check_tiling([(start, end, key) for key, (_, _, start, end) in tensors.items()], LENGTH_BYTES + length, size, where)
    return ShardHeader(tensors, metadata)


def check_tiling(spans: list[tuple[int, int, str]], begin: int, size: int, where: object) -> None:
    """Check that each byte from `begin` to the end of the file belongs to exactly one span.

    Raises:
        BadCheckpointError: if there is a gap, an overlap, or a span outside the file.
    """
    at = begin
    for start, end, key in sorted(spans):
        if start != at:
            raise BadCheckpointError(
                f"{where}: {key!r:.80}: begins at byte {start}, expected {at}: a gap or an overlap"
            )
        at = end
    if at != size:
        raise BadCheckpointError(f"{where}: its tensors end at byte {at}, but the file has {size} bytes")


def _entry(key: str, value: Any, begin: int, where: object) -> tuple[str, tuple[int, ...], int, int]:
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise BadCheckpointError(f"{where}: {key!r:.80}: expected dtype, shape and data_offsets")
    shape, offsets = value["shape"], value["data_offsets"]
    try:
        piece = Piece(key, value["dtype"], as_tuple(shape))
    except ValueError as error:
        raise BadCheckpointError(f"{where}: {error!s:.200}") from error
    if not isinstance(offsets, list) or len(offsets) != 2 or any(type(each) is not int for each in offsets):
        raise BadCheckpointError(f"{where}: {key:.80}: data_offsets must be two whole numbers")
    start, end = offsets
    if start < 0 or end - start != piece.nbytes:
        raise BadCheckpointError(f"{where}: {key:.80}: bytes {start} to {end} do not match its {piece.nbytes} bytes")
    return piece.dtype, piece.shape, begin + start, begin + end


def as_tuple(value: object) -> tuple[Any, ...]:
    """Convert a JSON list to a tuple.

    Raises:
        ValueError: if the value is not a list.
    """
    if not isinstance(value, list):
        raise ValueError(f"expected a list, got {type(value).__name__}")
    return tuple(value)
