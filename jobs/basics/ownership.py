"""Ownership rules for run folders: refuse folders that other users could change.

    check_folder     check that a run folder belongs to this user or root, and is not writable by everybody
    check_parents    check that nobody can replace it, as in a world-writable folder without the sticky bit
    made_by_us       check that a new folder belongs to this user, and close it to others
    private_folder   create a folder for this user only, on a machine with other users
    looking          a context in which runs shared by a colleague (`share: group` in the site file) may be read

The rules for files are in `jobs/basics/reading.py`.
"""

import os
import pwd
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from shlex import quote
from typing import Final

from muster.jobs.basics.errors import RunFolderError
from muster.jobs.basics.reading import UntrustedError, check_owner, is_trusted, trust, trusting

ALONE: Final = 0o700
SHARED: Final = 0o750
_FOLDER: Final = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_OTHER_FOLDER: Final = "choose another folder with --runs DIR"
_OVERFLOW: Final = Path("/proc/sys/kernel/overflowuid")
_USER_IDS: Final = Path("/proc/self/uid_map")
_ALL_IDS: Final = ["0", "0", "4294967295"]  # outside of user namespaces

_shares: ContextVar[Callable[[], bool] | None] = ContextVar("_shares", default=None)
_warned: set[str] = set()


@contextmanager
def looking(shares: Callable[[], bool]) -> Iterator[None]:
    """Allow a read-only command to read runs that colleagues share, if `shares` returns True."""
    token = _shares.set(shares)
    try:
        with trusting():
            yield
    finally:
        _shares.reset(token)


def check_folder(path: Path, *, warn: bool = True) -> None:
    """Refuse a run folder that another user could have written.

    Raises:
        UntrustedError: if the folder, or a link to it, belongs to another user, or everybody may write in it.
        RunFolderError: if `path` is not a folder, or cannot be opened.
    """
    try:
        link = path.lstat()
        if stat.S_ISLNK(link.st_mode):
            check_owner(path, link)
        descriptor = os.open(path, _FOLDER | (0 if stat.S_ISLNK(link.st_mode) else os.O_NOFOLLOW))
        try:
            status = os.fstat(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise RunFolderError(f"{path}: cannot be opened: {error.strerror}; name the folder of a run") from error
    if not is_trusted(status.st_uid) and _is_shared(status):
        trust(status.st_uid)
    check_owner(path, status)
    if status.st_mode & stat.S_IWOTH:
        raise UntrustedError(
            f"{path}: every user may write in this folder, so it was not used; "
            f"if its files are yours, first run: chmod o-w {quote(str(path))}"
        )
    if status.st_mode & stat.S_IWGRP and warn:
        warn_once(
            f"{path}: its group may write in it; to prevent that, run: chmod -R g-w {quote(str(path))}", "run folder"
        )


def check_parents(path: Path, *, warn: bool = True) -> None:
    """Refuse a folder that any user could rename and replace with another one.

    Raises:
        UntrustedError: if a folder above `path` belongs to a stranger, or is world-writable and has no sticky bit.
        RunFolderError: if a folder above `path` cannot be examined.
    """
    parents = Path(os.path.realpath(path)).parents
    try:
        found = [(parent, parent.stat()) for parent in parents]
    except OSError as error:
        raise RunFolderError(f"{error.filename}: cannot be examined: {error.strerror}; {_OTHER_FOLDER}") from error
    for parent, status in found:
        _check_parent_owner(parent, status, warn=warn)
        if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
            raise UntrustedError(
                f"{parent}: every user can replace the folders in it; run chmod o-w {quote(str(parent))}, "
                f"or {_OTHER_FOLDER}"
            )
    parent, mode = found[0][0], found[0][1].st_mode
    if warn and mode & stat.S_IWGRP and not mode & stat.S_ISVTX:
        warn_once(
            f"{parent}: its group can replace the runs in it; to prevent that, run: chmod g-w {quote(str(parent))}",
            "parent",
        )


def _check_parent_owner(parent: Path, status: os.stat_result, *, warn: bool) -> None:
    """Refuse a folder of a stranger, who could replace all folders in it. Warn of that of a colleague.

    A colleague has the folder's group, as this user does. Root is only warned, because in a container the folders of
    the host belong to others. Where root's files show as those of nobody, nobody is trusted. A command that only shows
    runs checks only the owner of each run.

    Raises:
        UntrustedError: if the folder belongs to a stranger.
    """
    owner = status.st_uid
    if is_trusted(owner) or _shares.get() is not None:
        return
    if owner == int(_OVERFLOW.read_text()) and _USER_IDS.read_text().split() != _ALL_IDS:
        return
    replaces = f"{parent}: belongs to user {owner}, who can replace the folders in it"
    if os.geteuid() == 0 or _has_group_with(owner, status.st_gid):
        if warn:
            warn_once(f"{replaces}; to prevent that, {_OTHER_FOLDER}", "owner of a parent")
        return
    raise UntrustedError(f"{replaces}; {_OTHER_FOLDER}")


def made_by_us(path: Path, *, shared: bool = False) -> None:
    """Restrict the permissions of a new folder; with `shared` its group may read it. On failure the folder is removed.

    Raises:
        RunFolderError: if the file system assigns new folders to another user, or lets others write in them.
        OSError: if the mode of the folder cannot be changed.
    """
    status = path.lstat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        path.rmdir()
        found = f"belong to user {status.st_uid} with mode {status.st_mode & 0o777:o}"
        raise RunFolderError(
            f"{path}: new folders on this file system {found}, expected user {os.geteuid()} (you) and mode 700; "
            f"{_OTHER_FOLDER}"
        )
    path.chmod((SHARED if shared else ALONE) | status.st_mode & stat.S_ISGID)


def private_folder(path: Path) -> None:
    """Create a folder for this user only, or check the existing one. Check every folder above it, too.

    Raises:
        UntrustedError: if one of these folders belongs to another user, or others may replace it or write in it.
        OSError: if a folder cannot be created.
    """
    real = Path(os.path.realpath(path))
    here, within = Path("/"), os.open("/", _FOLDER)
    try:
        for name in real.parts[1:]:
            here /= name
            child = _enter(within, name)
            os.close(within)
            within = child
            status = os.fstat(within)
            check_owner(here, status)
            open_to = status.st_mode & (0o022 if here == real else stat.S_IWOTH)
            if open_to and (here == real or not status.st_mode & stat.S_ISVTX):
                raise UntrustedError(f"{here}: other users may write in it, so it was not used; run chmod go-w on it")
    finally:
        os.close(within)


def warn_once(text: str, kind: str) -> None:
    """Warn on standard error, once per process for each kind of warning."""
    if kind not in _warned:
        _warned.add(kind)
        print(f"muster: warning: {text}", file=sys.stderr)


def _enter(within: int, name: str) -> int:
    """Open a subfolder of an open folder, but never a link. Create the subfolder if it does not exist."""
    with suppress(FileNotFoundError):
        return os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=within)
    with suppress(FileExistsError):  # another process was faster; the caller checks the owner
        os.mkdir(name, ALONE, dir_fd=within)
    return os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=within)


def _is_shared(status: os.stat_result) -> bool:
    """Return True if the folder is shared with a group of both its owner and this user, and `looking` allows it."""
    shares = _shares.get()
    if shares is None or status.st_mode & 0o072 != 0o050:
        return False
    return _has_group_with(status.st_uid, status.st_gid) and shares()


def _has_group_with(user: int, group: int) -> bool:
    """Return True if this user and another one are both in a group."""
    if group not in (os.getegid(), *os.getgroups()):
        return False
    try:
        other = pwd.getpwuid(user)
    except KeyError:
        return False
    return group in os.getgrouplist(other.pw_name, other.pw_gid)
