"""MANIFEST.json: its existence commits a checkpoint, and its contents locate all tensors in the shards.

    {"version": 1, "step": 50, "attempt": 0, "meta": {...},
     "files": [{"file": "shard-00000.safetensors", "bytes": 4096, "sha256": "..."}, ...],
     "tensors": {"model/fc.weight": {"dtype": "F32", "shape": [10, 4],
                                     "parts": [{"file": 0, "offset": 512, "box": [[0, 5], [0, 4]]}, ...]}, ...}}

The manifest is derived only from the `.ok` files, so every committer writes the same bytes. `parse_manifest` checks
that the parts of each tensor cover it exactly once, and that the parts lie inside their files and fill them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from muster.jobs.basics.errors import BadCheckpointError
from muster.jobs.checkpoint import disk, sealed
from muster.jobs.checkpoint.coverage import check_coverage
from muster.jobs.checkpoint.layout import LENGTH_BYTES, StoredPart, check_tiling
from muster.jobs.checkpoint.names import identity
from muster.jobs.checkpoint.pieces import MAX_ELEMENTS, Piece, whole
from muster.jobs.checkpoint.shard import MAX_WRITERS, ShardRecord, read_part
from muster.jobs.runfolder.checkpointdir import CheckpointDir

VERSION: Final = 1
_KEYS: Final = {"version", "step", "attempt", "files", "tensors", "meta"}
_HEX: Final = frozenset("0123456789abcdef")


@dataclass(frozen=True)
class ShardFile:
    """The size and hash of a shard at the time of the commit."""

    file: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class StoredTensor:
    """A logical tensor: its dtype, its global shape, and its stored parts."""

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[StoredPart, ...]

    @property
    def nbytes(self) -> int:
        """The bytes of all parts."""
        return sum(part.piece.nbytes for part in self.parts)


@dataclass(frozen=True)
class CheckpointManifest:
    """The manifest of one checkpoint. `tensors` maps names to tensors; `meta` is any JSON of the saver."""

    step: int
    attempt: int
    files: tuple[ShardFile, ...]
    tensors: Mapping[str, StoredTensor]
    meta: Mapping[str, Any]

    @property
    def nbytes(self) -> int:
        """The bytes of all shards."""
        return sum(each.bytes for each in self.files)

    @cached_property
    def encoded(self) -> bytes:
        """The bytes of MANIFEST.json."""
        return sealed.seal(self._body())

    @cached_property
    def sha256(self) -> str:
        """The hash stored in the manifest. Checkpoints with equal hashes have equal contents."""
        return sealed.sha256_of(self.encoded)

    def piece(self, name: str) -> Piece:
        """Return a tensor as a piece that covers all of it.

        Raises:
            KeyError: if there is no tensor of that name.
        """
        tensor = self.tensors[name]
        return whole(name, tensor.dtype, tensor.shape)

    @cached_property
    def parts(self) -> list[list[StoredPart]]:
        """The parts in each shard."""
        found: list[list[StoredPart]] = [[] for _ in self.files]
        for tensor in self.tensors.values():
            for part in tensor.parts:
                found[part.writer].append(part)
        return found

    def _body(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "step": self.step,
            "attempt": self.attempt,
            "files": [{"file": each.file, "bytes": each.bytes, "sha256": each.sha256} for each in self.files],
            "tensors": {
                name: {
                    "dtype": tensor.dtype,
                    "shape": tensor.shape,
                    "parts": [{"file": part.writer, **part.range_record} for part in tensor.parts],
                }
                for name, tensor in self.tensors.items()
            },
            "meta": self.meta,
        }


def manifest_of(folder: CheckpointDir, records: Sequence[ShardRecord]) -> CheckpointManifest:
    """Build the manifest from the records of all writers, in their order.

    Raises:
        BadCheckpointError: if a tensor has a gap, an overlap, two shapes or two dtypes.
    """
    step, attempt = identity(folder)
    tensors: dict[str, StoredTensor] = {}
    parts: dict[str, list[StoredPart]] = {}
    for record in records:
        for part in record.parts:
            parts.setdefault(part.piece.name, []).append(part)
    for name, stored in sorted(parts.items()):
        first = stored[0].piece
        if any((part.piece.dtype, part.piece.shape) != (first.dtype, first.shape) for part in stored):
            raise BadCheckpointError(f"{folder.path}: {name}: its writers disagree on its dtype or shape")
        tensors[name] = StoredTensor(first.dtype, first.shape, tuple(stored))
    files = tuple(ShardFile(each.file, each.bytes, each.sha256) for each in records)
    # Encode and parse, so that the result equals what readers get, with values as JSON stores them.
    made = CheckpointManifest(step, attempt, files, tensors, dict(records[0].meta or {}))
    return parse_manifest(folder, made.encoded)


def read_manifest(folder: CheckpointDir, *, patience_s: float = 0.0) -> CheckpointManifest:
    """Read and validate a manifest; wait up to `patience_s` for it to become visible on this node.

    Raises:
        FileNotFoundError: if there is no manifest, so the checkpoint does not exist.
        BadCheckpointError: if the manifest is damaged or inconsistent; the message gives the reason.
        StorageError: if the manifest cannot be read.
    """
    with disk.opened_folder(folder.path) as within:
        path = folder.manifest
        data = disk.read_small(within, path.name, path, sealed.MAX_BYTES, patience_s=patience_s)
    return parse_manifest(folder, data)


def parse_manifest(folder: CheckpointDir, data: bytes) -> CheckpointManifest:
    """Parse the bytes of a manifest and check every value.

    Raises:
        BadCheckpointError: as for `read_manifest`.
    """
    where = folder.manifest
    body = sealed.unseal(data, where)
    if type(body.get("version")) is not int or body["version"] != VERSION:
        raise BadCheckpointError(f"{where}: version {body.get('version')!r:.40}, expected {VERSION}")
    if body.keys() != _KEYS:
        raise BadCheckpointError(f"{where}: expected the keys {', '.join(sorted(_KEYS))}")
    for key, value in zip(("step", "attempt"), identity(folder), strict=True):
        if type(body[key]) is not int or body[key] != value:
            raise BadCheckpointError(
                f"{where}: {key} {body[key]!r:.40}, but the folder's is {value}: the file is from another checkpoint"
            )
    if not isinstance(body["meta"], dict):
        raise BadCheckpointError(f"{where}: meta must be an object")
    files = _files(folder, body["files"])
    tensors = _tensors(body["tensors"], len(files), where)
    manifest = CheckpointManifest(body["step"], body["attempt"], files, tensors, body["meta"])
    for name, tensor in tensors.items():
        check_coverage(name, [part.piece for part in tensor.parts], where)
    _check_files(manifest, where)
    if manifest.encoded != data:
        raise BadCheckpointError(f"{where}: its JSON is not in the form that Muster writes")
    return manifest


def _files(folder: CheckpointDir, given: Any) -> tuple[ShardFile, ...]:
    where = folder.manifest
    if not isinstance(given, list) or not 0 < len(given) <= MAX_WRITERS:
        raise BadCheckpointError(f"{where}: files must list 1 to {MAX_WRITERS} shards")
    files = []
    for writer, each in enumerate(given):
        if not isinstance(each, dict) or each.keys() != {"file", "bytes", "sha256"}:
            raise BadCheckpointError(f"{where}: each file must have the keys file, bytes and sha256")
        name, size, digest = each["file"], each["bytes"], each["sha256"]
        if name != folder.shard(writer).name:
            raise BadCheckpointError(f"{where}: file {name!r:.80}, expected {folder.shard(writer).name}")
        if type(size) is not int or not LENGTH_BYTES + 2 <= size <= 8 * MAX_ELEMENTS:
            raise BadCheckpointError(f"{where}: {name}: {size!r:.40} bytes is not a valid size")
        if not isinstance(digest, str) or len(digest) != 64 or not _HEX.issuperset(digest):
            raise BadCheckpointError(f"{where}: {name}: sha256 must be 64 hexadecimal digits")
        files.append(ShardFile(name, size, digest))
    return tuple(files)


def _tensors(given: Any, writers: int, where: object) -> dict[str, StoredTensor]:
    if not isinstance(given, dict):
        raise BadCheckpointError(f"{where}: tensors must be an object")
    tensors = {}
    for name, each in given.items():
        if not isinstance(each, dict) or each.keys() != {"dtype", "shape", "parts"}:
            raise BadCheckpointError(f"{where}: {name!r:.80}: each tensor must have the keys dtype, shape and parts")
        if not isinstance(each["parts"], list) or not each["parts"]:
            raise BadCheckpointError(f"{where}: {name!r:.80}: parts must be a nonempty list")
        parts = []
        for record in each["parts"]:
            if not isinstance(record, dict) or not record.keys() <= {"file", "offset", "box", "flat"}:
                raise BadCheckpointError(f"{where}: {name!r:.80}: each part must have file, offset, and box or flat")
            writer = record.get("file")
            if type(writer) is not int or not 0 <= writer < writers:
                raise BadCheckpointError(f"{where}: {name!r:.80}: file {writer!r:.40} is not one of {writers} files")
            parts.append(read_part(record, name, each["dtype"], each["shape"], writer, where))
        tensors[name] = StoredTensor(parts[0].piece.dtype, parts[0].piece.shape, tuple(parts))
    return tensors


def _check_files(manifest: CheckpointManifest, where: object) -> None:
    """Check that the parts fill their files, apart from the header."""
    for parts, file in zip(manifest.parts, manifest.files, strict=True):
        spans = [(part.offset, part.end, part.piece.key) for part in parts]
        begin = min(spans)[0] if spans else file.bytes
        if begin < LENGTH_BYTES + 2:
            raise BadCheckpointError(f"{where}: {file.file}: a part begins inside the header")
        check_tiling(spans, begin, file.bytes, f"{where}: {file.file}")
