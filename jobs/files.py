"""How files of a run are written and read: whole ones by rename, logs by appending whole lines.

What is read may be half written, torn by a full disk, or not there yet: none of that is an error to a reader.
"""

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jobs.errors import MusterError, RunFolderError, StorageError
from jobs.reading import json_lines


def write_text(path: Path, text: str) -> None:
    """Write a whole file under a temporary name, then rename it into place; errors as `write_bytes`."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes) -> None:
    """Write a whole file under a temporary name, then rename it into place.

    Raises:
        RunFolderError, StorageError: as `folder_error` says.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(data)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise folder_error(path, error) from error


def write_secret(path: Path, text: str) -> None:
    """Write a whole file that only this user may read, under a temporary name, then rename it into place.

    Raises:
        RunFolderError, StorageError: as `folder_error` says.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise folder_error(path, error) from error


def write_json(path: Path, value: Any) -> None:
    """Write a value as indented JSON, by rename."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Append one record as one line; errors as `append_lines`."""
    append_lines(path, [record])


def append_lines(path: Path, records: Sequence[dict[str, Any]]) -> None:
    """Append records as JSON lines with one write, so that a reader never sees half of one among whole ones.

    Raises:
        RunFolderError, StorageError: as `folder_error` says; the lines before stay whole.
    """
    if not records:
        return
    data = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            written = os.write(descriptor, data)
            if written != len(data):  # half a row would spoil the one after it; nobody else writes this file
                os.ftruncate(descriptor, os.fstat(descriptor).st_size - written)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise folder_error(path, error) from error
    if written != len(data):
        raise StorageError(f"{path}: the disk is full ({written} of {len(data)} bytes written); free some space")


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a log of a run (`jobs.reading.json_lines`); a missing file yields nothing.

    Raises:
        RunFolderError: it cannot be read, or belongs to another user.
    """
    try:
        yield from json_lines(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise RunFolderError(f"{path}: cannot be read: {(error.strerror or 'unknown reason').lower()}") from error


def expanded(path: str) -> Path:
    """Return a path whose `~` is the home folder; that of an unknown user stays."""
    return Path(os.path.expanduser(path))  # noqa: PTH111 (pathlib raises)


def folder_error(path: Path, error: OSError) -> MusterError:
    """Turn a failed write into the error that says what to do."""
    import errno

    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
        return StorageError(f"{path}: {error.strerror}; free some space, or choose another folder with --runs DIR")
    return RunFolderError(f"{path}: cannot write here: {error.strerror}; choose another folder with --runs DIR")
