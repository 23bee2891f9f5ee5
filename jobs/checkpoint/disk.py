"""Read and write files of a checkpoint folder by name, relative to the open folder, so that no file outside is touched.

Writing uses a temporary name, then fsync, a rename within the folder, and fsync of the folder. Reading accepts only
regular files: no links, pipes or devices. To test whether a file exists, its folder is listed: on NFS, `stat` and
`open` may use a cache that is a minute old.
"""

import contextlib
import errno
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

from muster.jobs.basics.errors import BadCheckpointError, MusterError, RunFolderError, StorageError
from muster.jobs.basics.reading import is_trusted
from muster.jobs.machine import linux

POLL_S: Final = 0.2
FAILING: Final = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ESTALE, errno.ETIMEDOUT, errno.EFBIG)
NOT_THERE: Final = (errno.ENOENT, errno.ESTALE)
Say = Callable[[str], None]
_NO_LINK: Final = os.O_NOFOLLOW | os.O_CLOEXEC


@contextlib.contextmanager
def opened_folder(path: Path) -> Iterator[int]:
    """Open a folder, but never a link to one, and yield its descriptor.

    Raises:
        FileNotFoundError: if the folder does not exist.
        BadCheckpointError: if `path` is not a folder, or belongs to another user.
        StorageError: if the folder cannot be read.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | _NO_LINK)
    except FileNotFoundError:
        raise
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise BadCheckpointError(f"{path}: not a folder, or a link to one; links are not followed") from error
        raise read_error(path, error) from error
    try:
        if not is_trusted(owner := os.fstat(descriptor).st_uid):
            raise BadCheckpointError(f"{path}: belongs to user {owner}, so it was not used")
        yield descriptor
    finally:
        os.close(descriptor)


def open_regular(folder: int, name: str, where: object, *, patience_s: float = 0.0) -> int:
    """Open a regular file of a folder for reading; wait up to `patience_s` for it to appear.

    Raises:
        FileNotFoundError: if the file does not exist.
        BadCheckpointError: if `name` is a link, a pipe, a device or a folder, or belongs to another user.
        StorageError: if the file cannot be read.
    """
    end_s = time.monotonic() + patience_s
    while True:
        try:
            descriptor = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | _NO_LINK, dir_fd=folder)
            break
        except OSError as error:
            if error.errno in NOT_THERE and time.monotonic() < end_s:
                time.sleep(POLL_S)
                names_in(folder, where)  # makes an NFS client ask its server again
                continue
            if error.errno == errno.ENOENT:
                raise
            if error.errno in (errno.ELOOP, errno.ENXIO, errno.ENODEV):
                raise BadCheckpointError(f"{where}: a link or a device, expected a file") from error
            raise read_error(where, error) from error
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise BadCheckpointError(f"{where}: not a regular file")
    if not is_trusted(status.st_uid):
        os.close(descriptor)
        raise BadCheckpointError(f"{where}: belongs to user {status.st_uid}, so it was not used")
    return descriptor


def read_small(folder: int, name: str, where: object, limit: int, *, patience_s: float = 0.0) -> bytes:
    """Read a whole file of at most `limit` bytes; errors as for `open_regular`."""
    descriptor = open_regular(folder, name, where, patience_s=patience_s)
    try:
        size = os.fstat(descriptor).st_size
        if size > limit:
            raise BadCheckpointError(f"{where}: {size} bytes, expected at most {limit}")
        return b"".join(chunks_of(descriptor, size, where))
    finally:
        os.close(descriptor)


def chunks_of(descriptor: int, size: int, where: object, *, chunk_bytes: int = 4 << 20) -> Iterator[bytes]:
    """Yield the first `size` bytes of a file in chunks.

    Raises:
        BadCheckpointError: if the file is shorter.
        StorageError: if the file cannot be read.
    """
    at = 0
    while at < size:
        chunk = pread(descriptor, min(chunk_bytes, size - at), at, where)
        yield chunk
        at += len(chunk)


def pread(descriptor: int, count: int, at: int, where: object) -> bytes:
    """Read exactly `count` bytes at an offset; errors as for `chunks_of`."""
    parts = []
    while count > 0:
        try:
            part = os.pread(descriptor, count, at)
        except OSError as error:
            raise read_error(where, error) from error
        if not part:
            raise BadCheckpointError(f"{where}: is truncated at byte {at}")
        parts.append(part)
        at += len(part)
        count -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def write_file(folder: Path, name: str, chunks: Iterable[memoryview | bytes], *, reserve: int = 0) -> None:
    """Write a file of a folder durably: temporary name, checked writes, fsync, rename, fsync of the folder.

    `reserve` bytes are allocated first, so that a full disk is detected early. On an error, no file is left behind.

    Raises:
        StorageError: if the disk is full or failing.
        RunFolderError: if the folder cannot be written.
    """
    path, temporary = folder / name, f".{name}.{os.getpid()}-{secrets.token_hex(4)}.tmp"
    with writing(path):
        within = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | _NO_LINK)
        try:
            try:
                ours = _write_temporary(within, temporary, chunks, reserve)
                _rename(within, temporary, name, ours)
            except BaseException:
                with contextlib.suppress(OSError):  # a leftover file does no harm; raise the first error
                    os.unlink(temporary, dir_fd=within)
                raise
            os.fsync(within)
        finally:
            os.close(within)


def names_in(folder: int, where: object) -> set[str]:
    """List the names in an open folder. On NFS a list comes from the server, while opening a file may use a cache.

    Raises:
        StorageError: if the folder cannot be read.
    """
    try:
        return set(os.listdir(folder))
    except OSError as error:
        raise read_error(where, error) from error


def is_there(folder: Path, name: str) -> bool:
    """Return True if a folder contains a name; errors as for `opened_folder` and `names_in`."""
    with opened_folder(folder) as within:
        return name in names_in(within, folder)


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable; errors as for `write_file`."""
    with writing(path):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Convert an OSError of a write to an error whose message states what to do."""
    try:
        yield
    except OSError as error:
        raise write_error(path, error) from error


def write_error(path: object, error: OSError) -> MusterError:
    """Convert the OSError of a failed write; the message states what to do."""
    if error.errno in FAILING:
        return StorageError(f"{path}: cannot be written: {error.strerror}; free some space, or repair the disk")
    return RunFolderError(f"{path}: cannot be written: {error.strerror}; check the owner and permissions of the folder")


def read_error(path: object, error: OSError) -> MusterError:
    """Convert the OSError of a failed read; the message states what to do."""
    return StorageError(f"{path}: cannot be read: {error.strerror}; check the disk and the permissions of the file")


def _write_temporary(within: int, name: str, chunks: Iterable[memoryview | bytes], reserve: int) -> tuple[int, int]:
    """Write and fsync a new file; return its device and inode."""
    descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINK, 0o644, dir_fd=within)
    try:
        if reserve:
            _reserve(descriptor, reserve)
        for chunk in chunks:
            view = memoryview(chunk)
            while view:
                view = view[os.write(descriptor, view) :]
        os.fsync(descriptor)  # NFS reports a full disk here
        status = os.fstat(descriptor)
    finally:
        os.close(descriptor)
    return status.st_dev, status.st_ino


def _reserve(descriptor: int, size: int) -> None:
    """Allocate the space for a file. If the file system does not support that, check that enough space is free."""
    try:
        linux.fallocate(descriptor, 0, size)
        return
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINTR):
            raise
    room = os.fstatvfs(descriptor)
    if room.f_bavail * room.f_frsize < size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _rename(within: int, source: str, target: str, ours: tuple[int, int]) -> None:
    """Rename within a folder. Ignore the failed retry of an NFS client whose first rename succeeded without a reply."""
    try:
        os.rename(source, target, src_dir_fd=within, dst_dir_fd=within)
    except FileNotFoundError:
        found = os.stat(target, dir_fd=within, follow_symlinks=False)
        if (found.st_dev, found.st_ino) != ours:
            raise
