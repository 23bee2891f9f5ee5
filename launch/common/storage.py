"""Run folders on nodes without shared storage: the agent sends its node's files to the supervisor.

A node shares the run folder if it can read a number that the supervisor has just written there. Otherwise the node
keeps its files under the same path, or in the temporary folder, and a Courier sends every new byte over the channel.
Other users of the node can neither read nor replace that folder: a folder that another user could have made is not
used, and links are not followed.

    node                                              supervisor
    RUN/attempt-000/rank-00003.out   ── file ──→      RUN/attempt-000/rank-00003.out
"""

import errno
import os
import stat
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Final

from muster.jobs.basics.errors import RunFolderError, UnreachableError
from muster.jobs.basics.files import folder_error, make_folder
from muster.jobs.basics.ownership import check_folder, private_folder, warn_once
from muster.jobs.basics.reading import UntrustedError, read_bytes
from muster.jobs.node.logcap import cap
from muster.jobs.runfolder.profiledir import PROFILE
from muster.jobs.runfolder.rundir import AttemptDir, RunDir

CHUNK_BYTES: Final = 1 << 18
LONGEST_NONCE: Final = 1 << 10
NO_FILE: Final = (errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENXIO, errno.EINVAL)  # it is not a regular file

Piece = tuple[str, int, bytes]  # a file's name below the run folder, an offset, and the bytes there


def is_shared(run: RunDir, nonce: str) -> bool:
    """Return whether this node can read the supervisor's new nonce in the run folder, and this user owns the folder."""
    try:
        check_folder(run.path, warn=False)
        return read_bytes(run.nonce("supervisor"), LONGEST_NONCE).decode().strip() == nonce
    except (OSError, ValueError, RunFolderError):
        return False


def find(run: RunDir, nonce: str) -> dict[str, str]:
    """Find where this node keeps a run: {"storage": "shared" | "apart" | "none", "run": path, "storage_why": text}."""
    if is_shared(run, nonce):
        if os.access(run.path, os.W_OK | os.X_OK):
            return {"storage": "shared", "run": str(run.path), "storage_why": ""}
        return {"storage": "none", "run": "", "storage_why": f"{run.path}: cannot be written by this user"}
    why = ""
    usual = Path(tempfile.gettempdir()) / f"muster-{os.geteuid()}" / run.run_id
    for place in (run.path, usual, None):
        try:
            path = place or _fresh(run.run_id)
            private_folder(path)
        except (OSError, UntrustedError) as error:
            why = why or str(folder_error(place or usual, error) if isinstance(error, OSError) else error)
            continue
        if os.access(path, os.W_OK | os.X_OK):
            return {"storage": "apart", "run": str(path), "storage_why": ""}
        why = why or f"{path}: cannot be written by this user"
    return {"storage": "none", "run": "", "storage_why": why}


@cache
def _fresh(run_id: str) -> Path:
    """Make a folder with a new name, because another user owns the usual one. All attempts use the same folder."""
    return Path(tempfile.mkdtemp(prefix=f"muster-{os.geteuid()}-")) / run_id


def files_of(run: RunDir, attempt: AttemptDir, node: int, ranks: Sequence[int]) -> list[Path]:
    """List the files that one node writes in an attempt. The supervisor accepts no other files from that node."""
    files = [attempt.setup(node), attempt.node(node)]
    for rank in ranks:
        files += [attempt.out(rank), attempt.err(rank), attempt.metrics(rank), attempt.memory(rank)]
        files += attempt.profile(rank).for_home
    return [*files, run.metrics, run.epochs, run.verify, attempt.bench, attempt.timeline] if 0 in ranks else files


class Courier:
    """The sender of new data from a node's own run folder to the supervisor."""

    def __init__(self, run: RunDir, attempt: AttemptDir, node: int, ranks: Sequence[int]) -> None:
        self.run = run
        self.offsets: dict[Path, int] = {}
        self.files = files_of(run, attempt, node, ranks)

    def news(self) -> Iterator[Piece]:
        """Yield the data added to files since the last call. Only this user's regular files are read."""
        for path in self.files:
            name = str(path.relative_to(self.run.path))
            try:
                descriptor = _open_within(self.run, name, os.O_RDONLY)
            except FileNotFoundError:
                continue
            except OSError as error:
                if error.errno not in NO_FILE:
                    raise
                warn_once(f"{path}: not sent to the run folder, because it is not a regular file", name)
                continue
            try:
                yield from self._pieces(descriptor, path, name)
            finally:
                os.close(descriptor)

    def _pieces(self, descriptor: int, path: Path, name: str) -> Iterator[Piece]:
        size, offset = os.fstat(descriptor).st_size, self.offsets.get(path, 0)
        while data := os.pread(descriptor, max(0, min(CHUNK_BYTES, size - offset)), offset):
            yield name, offset, data
            offset += len(data)
            self.offsets[path] = offset


def keep(run: RunDir, allowed: Sequence[Path], piece: Piece) -> None:
    """Write a piece of a file that a node has sent. Pieces arrive in order, so none begins beyond the end of the file.

    Raises:
        UnreachableError: if the file is not one of those `allowed`, or the offset lies beyond its end.
        RunFolderError, StorageError: if the file cannot be written.
    """
    name, offset, data = piece
    if name not in (str(path.relative_to(run.path)) for path in allowed):
        raise UnreachableError(f"its agent sent a file that is not its own: {name[:100]!r}")
    path = run.path / name
    try:
        if path.parent.name.startswith(PROFILE):  # the supervisor has made all other folders
            with suppress(FileExistsError):
                make_folder(path.parent)
        descriptor = _open_within(run, name, os.O_WRONLY | os.O_CREAT)
        try:
            size = os.fstat(descriptor).st_size
            if not 0 <= offset <= size:
                raise UnreachableError(f"its agent sent {name} from byte {offset}, and the file has {size} bytes")
            os.pwrite(descriptor, data, offset)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise folder_error(path, error) from error
    if path.suffix in (".out", ".err"):
        cap(path)


def _open_within(run: RunDir, name: str, flags: int) -> int:
    """Open a regular file of this user below a run folder, following no links. A new file gets the run's mode.

    Raises:
        OSError: if the file is missing, or not a regular file of this user.
    """
    within = os.open(run.path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        *folders, last = name.split("/")
        for each in folders:
            inner = os.open(each, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=within)
            os.close(within)
            within = inner
        mode = 0o600 | os.fstat(within).st_mode & 0o040
        flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        descriptor = os.open(last, flags, mode, dir_fd=within)
    finally:
        os.close(within)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file of this user", name)
    return descriptor
