"""Read and write the files of a run: whole files by rename, logs by appending whole lines.

Readers accept files that are half written, damaged by a full disk, or missing.
"""

import fcntl
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from muster.jobs.basics.errors import MusterError, RunFolderError, StorageError
from muster.jobs.basics.reading import LONGEST_LINE_BYTES, open_file, parse_json

LOCK_POLL_S: Final = 0.02
_APPEND: Final = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOCTTY | os.O_NOFOLLOW
_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


def mode_in(folder: Path) -> int:
    """Return the mode for a new file in a run folder: readable by the group if the folder is, never by others."""
    return 0o600 | folder.stat().st_mode & 0o040


def make_folder(path: Path) -> None:
    """Create a folder inside a run folder. Its group may read it if the parent's group may read the parent.

    Raises:
        OSError: if the folder cannot be created.
    """
    above = path.parent.stat().st_mode
    path.mkdir(mode=0o700)
    if above & 0o050:
        path.chmod(0o700 | above & 0o2050)


def write_text(path: Path, text: str) -> None:
    """Write a whole file under a temporary name, then rename it into place; errors as for `write_bytes`."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes, *, mode: int | None = None) -> None:
    """Write a whole file under a temporary name, then rename it into place. Without a mode, the umask applies.

    Raises:
        RunFolderError, StorageError: if the file cannot be written (see `folder_error`).
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{os.urandom(4).hex()}.tmp")
    try:
        descriptor = os.open(temporary, _NEW, 0o666 if mode is None else 0o600)
        with os.fdopen(descriptor, "wb") as file:
            if mode is not None:
                os.fchmod(descriptor, mode)
            file.write(data)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise folder_error(path, error) from error


def write_secret(path: Path, text: str) -> None:
    """Write a whole file that only this user may read; errors as for `write_bytes`."""
    write_bytes(path, text.encode(), mode=0o600)


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON into a run folder, by rename; errors as for `write_bytes`."""
    write_inside(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def write_inside(path: Path, data: bytes) -> None:
    """Write a whole file into a run folder by rename, with the mode of its other files; as `write_bytes`."""
    try:
        mode = mode_in(path.parent)
    except OSError as error:
        raise folder_error(path, error) from error
    write_bytes(path, data, mode=mode)


def open_log(path: Path) -> int:
    """Open a log in a run folder for appending; create it if it does not exist. Links are not followed.

    Raises:
        OSError: if the log cannot be opened.
    """
    try:
        return os.open(path, _APPEND)
    except FileNotFoundError:
        descriptor = os.open(path, _APPEND | os.O_CREAT, 0o600)
        if (mode := mode_in(path.parent)) != 0o600:
            os.fchmod(descriptor, mode)
        return descriptor


def reserve(path: Path, size: int) -> None:
    """Create a file with `size` bytes allocated on disk; errors as for `write_bytes`."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise folder_error(path, error) from error


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Append one record as one line; errors as for `append_lines`."""
    append_lines(path, [record])


def append_lines(path: Path, records: Sequence[dict[str, Any]]) -> None:
    """Append records as JSON lines with one write, so that a reader sees either a whole line or none of it.

    Raises:
        RunFolderError, StorageError: if the lines cannot be written (see `folder_error`); earlier lines stay intact.
    """
    if not records:
        return
    data = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()
    try:
        descriptor = open_log(path)
        try:
            written = os.write(descriptor, data)
            if written != len(data):  # remove the incomplete row; no other process writes to this file
                os.ftruncate(descriptor, os.fstat(descriptor).st_size - written)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise folder_error(path, error) from error
    if written != len(data):
        raise StorageError(f"{path}: the disk is full ({written} of {len(data)} bytes written); free some space")


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a log. A line that is not a JSON object is skipped. Otherwise as for `lines_of`."""
    for line in lines_of(path):
        with suppress(ValueError):  # skip damaged lines, which a full disk can cause
            yield parse_json(line)  # valid JSON that begins with { is an object


def lines_of(path: Path) -> Iterator[bytes]:
    """Yield the lines of a log one at a time, so that memory use does not depend on its size. A missing log yields
    nothing.

    An unfinished last line, a line longer than `LONGEST_LINE_BYTES`, and a line that does not begin with { are skipped.

    Raises:
        RunFolderError: if the log cannot be read, or belongs to another user.
    """
    try:
        with open_file(path) as file:
            while line := file.readline(LONGEST_LINE_BYTES):
                if not line.endswith(b"\n"):
                    while line and not line.endswith(b"\n"):  # skip the rest of an overlong line
                        line = file.readline(LONGEST_LINE_BYTES)
                elif line.lstrip().startswith(b"{"):  # a quick test that avoids slow exceptions
                    yield line
    except FileNotFoundError:
        return
    except OSError as error:
        raise RunFolderError(f"{path}: cannot be read: {(error.strerror or 'unknown reason').lower()}") from error


def locked(descriptor: int, wait_s: float) -> bool:
    """Lock an open file or folder until it is closed; return False if another process keeps it locked for `wait_s`.

    Raises:
        OSError: if the file system does not support locks.
    """
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(LOCK_POLL_S)


def expanded(path: str) -> Path:
    """Return a path with `~` replaced by the home folder. The `~NAME` of an unknown user is kept."""
    return Path(os.path.expanduser(path))  # noqa: PTH111 (pathlib raises)


def folder_error(path: Path, error: OSError) -> MusterError:
    """Convert an OSError of a write to an error whose message states what to do."""
    import errno

    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
        return StorageError(f"{path}: {error.strerror}; free some space, or choose another folder with --runs DIR")
    return RunFolderError(f"{path}: cannot write here: {error.strerror}; choose another folder with --runs DIR")
