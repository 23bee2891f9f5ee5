"""Copy the submitted code to the run folder, so that later edits do not affect a run in a queue.

    <run>/code/muster    our own package, from which agents are started (jobs/basics/boot.py)
    <run>/code/work      for a `command:` job, the code in the user's working folder (worktree.py)
    <run>/code/code.json the origin of both: commit, branch, differences from the commit, names of all files

Files of the user are copied, never hard-linked, because an edit in place would change both. Our own files are copied
too, and then shared between runs (codestore.py). Only this user may enter the folders.
A file keeps the mode of its source.
"""

import errno
import json
import os
import shutil
import stat
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from muster.jobs.basics.boot import CODE_ROOT
from muster.jobs.basics.errors import MusterError, RefusedError
from muster.jobs.basics.files import folder_error, write_text
from muster.jobs.basics.words import counted
from muster.jobs.runfolder.rundir import RunDir, all_runs
from muster.launch.common import gitfacts
from muster.launch.common.fingerprint import PACKAGE, fingerprint
from muster.launch.common.gitfacts import GitError
from muster.launch.common.worktree import NEITHER, Survey, heaviest_folder, survey
from muster.launch.submit.codestore import PREFIX, share

WORK: Final = "work"
RECORD: Final = "code.json"
MOST_BYTES: Final = 64 << 20
MOST_FILES: Final = 5_000
COPIERS: Final = 8  # files copied at the same time, because each copy waits for the server on network storage
VANISHED: Final = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE, errno.ELOOP)
OWN_FILE: Final = "muster/__init__.py"


@dataclass(frozen=True)
class CodeSnapshot:
    """A copy of the code: the folders in which agents start and ranks run, and notes for the user."""

    code: Path
    workdir: Path
    notes: tuple[str, ...] = ()


def take(run: RunDir, *, workdir: Path, program: bool, argv: Sequence[str] = ()) -> CodeSnapshot:
    """Copy Muster's code and, if `program`, the code in the user's working folder into a run folder.

    `argv`: the program's command. Every word that is the absolute path of a file in the working folder adds a note.

    Raises:
        RefusedError: if the working folder is too large to be only code.
        RunFolderError, StorageError: if the run folder cannot be written; no partial copy is left.
    """
    work = survey(workdir, other_runs(run, workdir)) if program else None
    if work is not None:
        check_size(work)
    usual = os.umask(0o077)  # the working folder, or a file in it, may be private
    try:
        run.code.mkdir()
        own = own_files(CODE_ROOT)
        copy(CODE_ROOT, own, run.code)
        share(run.path.parent, (run.code / each for each in own))
        record: dict[str, Any] = {"time": time.time(), PACKAGE: _own_record(run, len(own)), WORK: None}
        notes: list[str] = []
        if work is not None:
            left_out = copy(workdir, work.files, run.code / WORK)
            link(workdir, work.links, run.code / WORK)
            notes = [*work.notes, *left_out, *beside_the_copy(argv, work)]
            record[WORK] = _work_record(work, left_out)
        # ASCII, because names and a diff may contain bytes that are not UTF-8.
        write_text(run.code / RECORD, json.dumps(record, indent=1) + "\n")
    except (OSError, MusterError) as error:
        shutil.rmtree(run.code, ignore_errors=True)
        raise folder_error(run.code, error) if isinstance(error, OSError) else error from error
    finally:
        os.umask(usual)
    return CodeSnapshot(run.code, workdir if work is None else run.code / WORK, tuple(notes))


def other_runs(run: RunDir, workdir: Path) -> list[Path]:
    """List the folders of runs, which are not copied: their parent or, if that is `workdir`, the folder of each run."""
    root = run.path.parent
    if os.path.realpath(root) != os.path.realpath(workdir):
        return [root]
    return [run.path, *(each.path for each in all_runs(root)), *root.glob(f"{PREFIX}*")]


def beside_the_copy(argv: Sequence[str], work: Survey) -> list[str]:
    """Return a warning for each word that is the absolute path of code: the run would see later edits of that file."""
    found = []
    for word in argv:
        name = os.path.relpath(word, work.folder) if word.startswith("/") else ""
        if name in work.files:
            found.append(f"{word}: is outside the copy, so later edits affect the run; use a relative path: {name}")
    return found


def check_size(work: Survey) -> None:
    """Check that a working folder is small enough to be only code.

    Raises:
        RefusedError: if it is too large; the message names the largest folder and what to do.
    """
    many, large = len(work.files) > MOST_FILES, work.total_bytes > MOST_BYTES
    if not many and not large:
        return
    weights = work.files if large else dict.fromkeys(work.files, 1)
    most = heaviest_folder(weights)
    inside = [size for name, size in work.files.items() if most == "." or name.startswith(f"{most}/")]
    more = "" if work.complete else "more than "
    ignore = "list it in .gitignore" if work.by_git else "make this a git repository and list it in .gitignore"
    raise RefusedError(
        f"{work.folder}: {more}{_amount(work.files.values())}, too much to copy as code (at most "
        f"{MOST_FILES} files, {_mb(MOST_BYTES)}); most of it is in {most}: {_amount(inside)}; {ignore}, so that it "
        "is linked; or run without a copy: --no-snapshot"
    )


def own_files(root: Path) -> list[str]:
    """List the files of Muster's package below a code root: sources and data. Links are followed."""
    found = []
    for folder, folders, files in os.walk(root / PACKAGE, followlinks=True):
        folders[:] = [each for each in folders if each not in NEITHER and not each.startswith(".")]
        inside = Path(folder).relative_to(root).as_posix()
        found += [f"{inside}/{each}" for each in files]
    return sorted(found)


def copy(source: Path, names: Iterable[str], target: Path) -> list[str]:
    """Copy files and symbolic links below `source`. Return a note for each unreadable file; skip deleted files.

    Raises:
        OSError: if the target cannot be written.
    """
    names = list(names)
    for folder in sorted({str((target / name).parent) for name in names} | {str(target)}):
        Path(folder).mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(COPIERS) as pool:
        said = pool.map(lambda name: _copy_one(source, name, target), names)
        return [text for text in said if text]


def link(source: Path, names: Iterable[str], target: Path) -> None:
    """Create links in the copy for files that are not copied.

    Raises:
        OSError: if the target cannot be written.
    """
    for name in names:
        path = target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(source / name)


def _copy_one(source: Path, name: str, target: Path) -> str:
    """Copy one file with its mode and times; return a note if it cannot be read."""
    try:
        status = (source / name).lstat()
        if stat.S_ISLNK(status.st_mode):
            pointed = moved_link(source, name, str((source / name).readlink()))
            file = None
        elif stat.S_ISREG(status.st_mode):
            file = (source / name).open("rb")
        else:
            return ""  # it is no longer a regular file
    except OSError as error:
        return "" if error.errno in VANISHED else f"{name}: skipped, because it cannot be read: {error.strerror}"
    path = target / name
    if file is None:
        path.symlink_to(pointed)
        return ""
    with file, path.open("wb") as copied:
        shutil.copyfileobj(file, copied, 1 << 20)
    path.chmod(stat.S_IMODE(status.st_mode) & 0o777 | stat.S_IRUSR | stat.S_IWUSR)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    return ""


def moved_link(source: Path, name: str, pointed: str) -> str:
    """Return the target of a copied link. A target inside the source becomes the same target inside the copy.

    Pure: computed from the names alone, since the copy has the same folders.
    """
    folder = os.path.dirname(name)  # noqa: PTH120 (a relative path of any bytes)
    meant = os.path.normpath(source / folder / pointed)
    inside = os.path.relpath(meant, source)
    if inside.partition("/")[0] == os.pardir:
        return meant
    return pointed if not pointed.startswith("/") else os.path.relpath(inside, folder or os.curdir)


def _own_record(run: RunDir, files: int) -> Mapping[str, Any]:
    return {
        "from": str(CODE_ROOT),
        "fingerprint": fingerprint(str(run.code)),
        "files": files,
        "origin": _origin(CODE_ROOT, OWN_FILE),
    }


def _work_record(work: Survey, left_out: list[str]) -> Mapping[str, Any]:
    return {
        "from": str(work.folder),
        "bytes": work.total_bytes,
        "files": sorted(work.files),
        "links": work.links,
        "notes": [*work.notes, *left_out],
        "origin": _origin(work.folder) if work.by_git else None,
    }


def _origin(folder: Path, tracked: str = "") -> dict[str, Any] | None:
    """Return git's facts about a folder, or None. If `tracked` is given, git must track that file in the folder."""
    try:
        if tracked:  # an untracked file means that the folder is within an unrelated repository
            gitfacts.git(folder, "ls-files", "--error-unmatch", "--", tracked)
        return gitfacts.origin(folder)
    except GitError:
        return None


def _amount(sizes: Collection[int]) -> str:
    return f"{counted(len(sizes), 'file')} of {_mb(sum(sizes))}"


def _mb(size: int) -> str:
    return f"{size / (1 << 20):,.1f} MB"
