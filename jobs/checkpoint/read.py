"""Read pieces of a checkpoint, which may be split differently from the saved pieces."""

import os
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Final

from muster.jobs.basics.errors import BadCheckpointError, RefusedError
from muster.jobs.checkpoint import disk
from muster.jobs.checkpoint.layout import StoredPart
from muster.jobs.checkpoint.manifest import CheckpointManifest
from muster.jobs.checkpoint.pieces import Piece
from muster.jobs.checkpoint.remote import NodesMemory
from muster.jobs.runfolder.checkpointdir import CheckpointDir

DIRECT_BYTES: Final = 64 << 10  # shorter runs are read through a window, longer ones directly into the buffer
WINDOW_BYTES: Final = 1 << 20
REMOTE_BYTES: Final = 4 << 20  # of one request to another node

if TYPE_CHECKING:
    from typing_extensions import Buffer, Self  # may be missing from the Python of a user's program

Run = tuple[int, int, int]  # offset in the file, offset in the buffer, number of bytes


class CheckpointReader:
    """A context manager that reads pieces of one committed checkpoint, and keeps its shards open.

    `remote` reads the shards that are not in the folder; without it, every shard must be there within `patience_s`.
    """

    def __init__(
        self,
        folder: CheckpointDir,
        manifest: CheckpointManifest,
        *,
        patience_s: float = 0.0,
        remote: NodesMemory | None = None,
    ) -> None:
        self._folder = folder
        self._manifest = manifest
        self._patience_s = 0.0 if remote is not None else patience_s
        self._remote = remote
        self._open: dict[int, int | None] = {}  # None: the shard is on another node

    def __enter__(self) -> "Self":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the shards."""
        for descriptor in self._open.values():
            if descriptor is not None:
                os.close(descriptor)
        self._open.clear()
        if self._remote is not None:
            self._remote.close()

    def names(self) -> list[str]:
        """List the names of the tensors, sorted."""
        return sorted(self._manifest.tensors)

    def piece(self, name: str) -> Piece:
        """Return a tensor as a piece that covers all of it.

        Raises:
            RefusedError: if the checkpoint has no such tensor.
        """
        if name not in self._manifest.tensors:
            raise RefusedError(f"{self._folder.path}: has no tensor {name}; did the model change?")
        return self._manifest.piece(name)

    def read_into(self, piece: Piece, buffer: "Buffer") -> None:
        """Fill a buffer with a piece of a stored tensor.

        Raises:
            RefusedError: if the checkpoint has no such tensor, or its dtype or shape differs.
            BadCheckpointError: if a shard is missing or truncated.
            StorageError: if a shard cannot be read.
            UnreachableError: if no other node has sent a shard that this node lacks.
            ValueError: if the buffer does not fit the piece.
        """
        stored = self.piece(piece.name)
        if (stored.dtype, stored.shape) != (piece.dtype, piece.shape):
            found, wanted = f"{stored.dtype} {list(stored.shape)}", f"{piece.dtype} {list(piece.shape)}"
            raise RefusedError(f"{self._folder.path}: {piece.name} is {found}, but the job needs {wanted}")
        view = memoryview(buffer)
        if view.readonly or not view.c_contiguous or view.nbytes != piece.nbytes:
            raise ValueError(f"{piece.key}: expected a writable, contiguous buffer of {piece.nbytes} bytes")
        if not piece.nbytes:
            return
        for part in self._manifest.tensors[piece.name].parts:
            runs = joined(shared_runs(part, piece))
            if (first := next(runs, None)) is not None:
                self._read(part.writer, first, runs, view.cast("B"))

    def _read(self, writer: int, first: Run, rest: Iterator[Run], view: memoryview) -> None:
        """Read runs: long ones directly into place, short ones through a window that spans many of them."""
        window, begin = memoryview(b""), 0
        run: Run | None = first
        while run is not None:
            (at, to, count), run = run, next(rest, None)
            if count >= DIRECT_BYTES:
                self._read_direct(writer, view[to : to + count], at)
            else:
                if not begin <= at <= at + count <= begin + len(window):
                    end = at + count if run is None else min(at + WINDOW_BYTES, self._manifest.files[writer].bytes)
                    window, begin = memoryview(bytearray(end - at)), at
                    self._read_direct(writer, window, at)
                view[to : to + count] = window[at - begin : at - begin + count]

    def _read_direct(self, writer: int, view: memoryview, at: int) -> None:
        """Fill `view` with the bytes of a shard from the offset `at`."""
        descriptor = self._shard(writer)
        while view:
            if descriptor is None:
                assert self._remote is not None
                count = min(len(view), REMOTE_BYTES)
                view[:count] = self._remote.read(writer, at, count)
            else:
                count = _read_some(descriptor, view, at, self._folder.shard(writer))
            view, at = view[count:], at + count

    def _shard(self, writer: int) -> int | None:
        if writer not in self._open:
            path, wanted = self._folder.shard(writer), self._manifest.files[writer]
            try:
                with disk.opened_folder(self._folder.path) as within:
                    descriptor = disk.open_regular(within, wanted.file, path, patience_s=self._patience_s)
            except FileNotFoundError as error:
                if self._remote is None:
                    raise BadCheckpointError(f"{path}: missing") from error
                self._open[writer] = None
                return None
            self._open[writer] = descriptor
            if (size := os.fstat(descriptor).st_size) != wanted.bytes:
                raise BadCheckpointError(f"{path}: {size} bytes, but {wanted.bytes} were saved")
        return self._open[writer]


def shared_runs(part: StoredPart, wanted: Piece) -> Iterator[Run]:
    """Yield the ranges common to a stored part and a wanted piece, ascending in row-major order."""
    stored_runs, wanted_runs, item = part.piece.runs(), wanted.runs(), wanted.item_bytes
    if not len(stored_runs) or not len(wanted_runs):
        return
    i = j = 0
    while i < len(stored_runs) and j < len(wanted_runs):
        start, stop = stored_runs[i]
        low, high = wanted_runs[j]
        if stop <= low:
            i = stored_runs.first_after(low, i + 1)
        elif high <= start:
            j = wanted_runs.first_after(start, j + 1)
        else:
            first, last = max(start, low), min(stop, high)
            from_element = i * stored_runs.length + first - start
            to_element = j * wanted_runs.length + first - low
            yield part.offset + from_element * item, to_element * item, (last - first) * item
            i, j = (i + 1, j) if stop <= high else (i, j + 1)


def joined(runs: Iterator[Run]) -> Iterator[Run]:
    """Merge consecutive runs that are contiguous in both the file and the buffer."""
    held = next(runs, None)
    if held is None:
        return
    for run in runs:
        if run[0] == held[0] + held[2] and run[1] == held[1] + held[2]:
            held = (held[0], held[1], held[2] + run[2])
        else:
            yield held
            held = run
    yield held


def _read_some(descriptor: int, view: memoryview, at: int, where: object) -> int:
    try:
        count = os.preadv(descriptor, [view], at)
    except OSError as error:
        raise disk.read_error(where, error) from error
    if not count:
        raise BadCheckpointError(f"{where}: is truncated at byte {at}")
    return count
