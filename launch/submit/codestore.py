"""Store each of Muster's own files only once, even if many run folders contain it.

    <runs>/<run>/code/muster/launch/cli.py ─┐
    <runs>/<other>/code/muster/launch/cli.py ├─ one file with three names (hard links)
    <runs>/.code-<uid>/<sha256>-<mode> ─────┘

Each run folder stays complete: it can be copied, or removed, without the store. A stored file with one name left
belongs to no run, and `collect` deletes it. Nothing writes to these files in place. If somebody did, the content would
no longer match the name, and the next run would store the file again.

The user's own files are not stored here, because a program may write to the files of its working folder.
"""

import hashlib
import os
import secrets
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

from muster.jobs.basics.errors import RunFolderError
from muster.jobs.basics.files import folder_error

PREFIX: Final = ".code-"
CHUNK_BYTES: Final = 1 << 20


def store_of(root: Path) -> Path:
    """Return this user's store below a folder of runs. Nothing is created."""
    return root / f"{PREFIX}{os.geteuid()}"


def share(root: Path, paths: Iterable[Path]) -> None:
    """Replace files of a run below `root` by stored ones with the same content and mode, and store new ones.

    Without a usable store (no hard links, or a folder that others can change) the files stay as they are.
    """
    store = store_of(root)
    try:
        store.mkdir(mode=0o700, exist_ok=True)
        if not _is_ours(store):
            return
        for path in paths:
            _share_one(store, path)
    except OSError:
        return  # the run keeps its own copies, which only costs disk space


def collect(root: Path) -> int:
    """Delete the stored files that no run uses any more; return the number of bytes freed.

    A run that is being submitted may link a file at the same moment. The run keeps the file; only the store loses it.

    Raises:
        RunFolderError, StorageError: if a file cannot be deleted.
    """
    store, freed = store_of(root), 0
    if not os.path.lexists(store):
        return 0
    if not _is_ours(store):
        raise RunFolderError(f"{store}: is not a folder that only you can change, so it was not used; remove it")
    try:
        for each in os.scandir(store):
            status = each.stat(follow_symlinks=False)
            if status.st_nlink == 1 and stat.S_ISREG(status.st_mode):
                Path(each.path).unlink(missing_ok=True)
                freed += status.st_size
    except OSError as error:
        raise folder_error(store, error) from error
    return freed


def _share_one(store: Path, path: Path) -> None:
    mode = stat.S_IMODE(path.lstat().st_mode)
    digest = _digest(path)
    stored, temporary = store / f"{digest}-{mode:o}", f".{secrets.token_hex(8)}.tmp"
    with suppress(OSError):  # the file is not stored, has changed, or has as many links as the file system allows
        if stat.S_ISREG(stored.lstat().st_mode) and _digest(stored) == digest:
            _replace(stored, path.with_name(temporary), path)
            return
    _replace(path, store / temporary, stored)


def _replace(source: Path, temporary: Path, target: Path) -> None:
    """Make `target` another name of the file `source`, in one step."""
    os.link(source, temporary, follow_symlinks=False)
    try:
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)  # rename does nothing if both names are links to the same file


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(CHUNK_BYTES):
            digest.update(part)
    return digest.hexdigest()


def _is_ours(folder: Path) -> bool:
    status = folder.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o022
