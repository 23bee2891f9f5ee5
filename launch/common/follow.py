"""Read growing files line by line. Only offsets are kept, so a file may be replaced, truncated or created later.

A file is read again from its start if it shrank, was replaced, or no longer contains the bytes read last (after
logrotate's copytruncate, or when a rank reopens its log). Before that, an unfinished line that was read earlier is
returned. The hole in a capped log (`jobs/node/logcap.py`) is skipped.
"""

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from muster.jobs.basics.reading import open_file, read_end
from muster.jobs.basics.terminal import last_state
from muster.jobs.node.logcap import SECTOR_BYTES

CHUNK_BYTES: Final = 1 << 18
MOST_TAIL_BYTES: Final = 1 << 26
LONGEST_LINE_BYTES: Final = 1 << 20
FINGERPRINT_BYTES: Final = 64


class LineFollower:
    """A follower of one file from `offset`, line by line. Memory use is bounded for any size of file or line.

    A line longer than `longest_bytes` is returned in pieces, cut between UTF-8 characters. `on_restart(path)` is called
    before the first line after the file was truncated or replaced.
    """

    def __init__(
        self,
        path: Path,
        *,
        offset: int = 0,
        longest_bytes: int = LONGEST_LINE_BYTES,
        on_restart: Callable[[Path], None] | None = None,
    ) -> None:
        self.path = path
        self.offset = offset
        self._longest_bytes = longest_bytes
        self._on_restart = on_restart
        self._held = bytearray()
        self._fingerprint = b""  # the last bytes read, to detect that the file was truncated
        self._inode: tuple[int, int] | None = None
        self._seen: tuple[int, int, int] | None = None

    def poll(self) -> Iterator[bytes]:
        """Yield the complete lines since the last call, without their newlines; nothing if the file is missing.

        A newline byte is never part of another UTF-8 character, so each line can be decoded by itself.
        """
        if self._seen is not None and not self._has_changed():
            return
        try:
            file = open_file(self.path)
        except FileNotFoundError:
            return
        with file:
            descriptor = file.fileno()
            status = os.fstat(descriptor)
            self._seen = _sign_of(status)
            if self._was_cut(descriptor, status):
                yield from self._restart()
            # Stop at the current size, so that a fast writer cannot keep the reader from other files.
            size = status.st_size
            while self.offset < size:
                end = self._skip_hole(descriptor, size)
                data = os.pread(descriptor, min(CHUNK_BYTES, end - self.offset), self.offset)
                if not data:
                    break
                self.offset += len(data)
                self._fingerprint = (self._fingerprint + data)[-FINGERPRINT_BYTES:]
                yield from self._split(data)

    def flush(self) -> Iterator[bytes]:
        """Yield the unfinished last line, if there is one. Call this after the writer has ended."""
        if self._held:
            line = bytes(self._held)
            self._held.clear()
            yield line

    def _has_changed(self) -> bool:
        try:
            status = self.path.stat()
        except FileNotFoundError:
            return False
        # If the sign is the same, the file has not changed, but a part may still be unread.
        return _sign_of(status) != self._seen or status.st_size != self.offset

    def _was_cut(self, descriptor: int, status: os.stat_result) -> bool:
        inode = (status.st_dev, status.st_ino)
        known, self._inode = self._inode or inode, inode
        if inode != known or status.st_size < self.offset:
            return True
        if not (length := len(self._fingerprint)):
            return False
        found = os.pread(descriptor, length, self.offset - length)
        return not self._fingerprint.endswith(found.lstrip(b"\0"))  # capping a log zeroes its old bytes

    def _skip_hole(self, descriptor: int, size: int) -> int:
        """Move to the next byte outside a hole; return the start of the next hole."""
        if os.fstat(descriptor).st_blocks * SECTOR_BYTES >= size:
            return size
        try:
            begin = os.lseek(descriptor, self.offset, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            begin = size  # the rest of the file is a hole (bytes that were discarded)
        if begin > self.offset:
            self.offset, self._fingerprint = begin, b""
        return os.lseek(descriptor, begin, os.SEEK_HOLE) if begin < size else size

    def _restart(self) -> Iterator[bytes]:
        self.offset, self._fingerprint = 0, b""
        yield from self.flush()
        if self._on_restart is not None:
            self._on_restart(self.path)

    def _split(self, data: bytes) -> Iterator[bytes]:
        *whole, rest = data.split(b"\n")
        for line in whole:
            if self._held or len(line) > self._longest_bytes:
                self._held += line
                yield from self._pieces()
                yield from self.flush() if self._held else (b"",)
            else:
                yield line
        self._held += rest
        yield from self._pieces()

    def _pieces(self) -> Iterator[bytes]:
        """Yield pieces of an overlong line until the rest fits into `longest_bytes`."""
        while len(self._held) > self._longest_bytes:
            cut = self._longest_bytes
            while cut > self._longest_bytes - 3 and self._held[cut] & 0xC0 == 0x80:  # within a UTF-8 character
                cut -= 1
            piece = bytes(self._held[:cut])
            del self._held[:cut]
            yield piece


def _sign_of(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_ino, status.st_size, status.st_mtime_ns


def decoded(line: bytes) -> str:
    """Return a line as text, with invalid UTF-8 as U+FFFD."""
    return line.decode(errors="replace")


def as_shown(line: bytes) -> str:
    """Return a rank's line in the final state that a terminal would show, safe to print."""
    return last_state(decoded(line))


def tail_lines(path: Path, count: int) -> list[str]:
    """Return the last `count` lines of a file as shown, including an unfinished one; [] for a missing file.

    Reads only the last `CHUNK_BYTES`, so very long lines may be cut or missing.
    """
    try:
        data = read_end(path, CHUNK_BYTES)
    except FileNotFoundError:
        return []
    lines = data.removesuffix(b"\n").split(b"\n") if data else []
    return [as_shown(line) for line in (lines[-count:] if count else ())]


def offset_of_last(path: Path, lines: int) -> int:
    """Return the offset of the last `lines` lines of a file, including an unfinished one; 0 if it has fewer.

    Reads at most `MOST_TAIL_BYTES` backwards in blocks, because the file may be larger than memory.
    """
    try:
        file = open_file(path)
    except FileNotFoundError:
        return 0
    with file:
        descriptor = file.fileno()
        end = os.fstat(descriptor).st_size
        if lines == 0:
            return end
        first = max(0, end - MOST_TAIL_BYTES)
        position = max(0, end - 1)  # a newline at the very end does not begin another line
        missing = lines
        while position > first:
            begin = max(first, position - CHUNK_BYTES)
            block = os.pread(descriptor, position - begin, begin)
            found = len(block)
            while missing and (found := block.rfind(b"\n", 0, found)) >= 0:
                missing -= 1
            if not missing:
                return begin + found + 1
            position = begin
        return first
