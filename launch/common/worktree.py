"""Find the code in a working folder: the files that a copy must contain, and the files that the copy may link to.

    in a git work tree   tracked files, and new ones that git does not ignore, are code
    elsewhere            all files are code, except in hidden folders, caches and Python environments

Everything else (data, results, environments) is linked from the copy. So a program finds its data in the usual place,
and its results do not end up in the copy. Caches and .git are neither copied nor linked. Names may be any bytes.
"""

import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Final

from muster.launch.common import gitfacts
from muster.launch.common.gitfacts import GitError

CACHES: Final = frozenset(
    ("__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis", ".ipynb_checkpoints", ".tox", ".nox")
)
NEITHER: Final = CACHES | {".git", ".hg", ".svn"}
ENVIRONMENTS: Final = ("pyvenv.cfg", "conda-meta")  # a folder that contains one of these is a Python environment
LINKS_EACH: Final = 2_000  # maximum ignored entries in a folder of code; a folder with more is treated as data
WALK_FILES: Final = 100_000  # stop at this many files, for example in a home folder


@dataclass
class Survey:
    """The files found below `folder`: relative paths with their sizes in bytes, and the links to make."""

    folder: Path
    files: dict[str, int] = field(default_factory=dict)
    links: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    by_git: bool = False
    complete: bool = True  # False: the walk was stopped because there were too many files

    @property
    def total_bytes(self) -> int:
        """The size of all files."""
        return sum(self.files.values())


def survey(folder: Path, leave: Iterable[Path] = ()) -> Survey:
    """Find the code in a folder. Treat the folders in `leave` (absolute paths) as data."""
    found = Survey(folder)
    beyond = frozenset(_inside(folder, leave))
    try:
        found.by_git = gitfacts.holds(folder)
        listed = list(_tracked(folder, "")) if found.by_git else []
        ignored = gitfacts.names(folder, "-o", "-i", "--directory") if found.by_git else []
    except GitError as error:
        found.notes.append(f"{folder}: all files count as code, because git failed: {error}")
        found.by_git, listed, ignored = False, [], []
    if found.by_git:
        _by_git(found, listed, ignored, beyond)
    else:
        _walk(found, "", beyond)
    return found


def heaviest_folder(weights: dict[str, int]) -> str:
    """Return the deepest folder with more than half of the total weight (bytes, or 1 per file); "." if none has."""
    here, inside = "", weights
    while True:
        shares: dict[str, dict[str, int]] = {}
        for name, weight in inside.items():
            first, slash, _ = name[len(here) :].partition("/")
            if slash:
                shares.setdefault(f"{here}{first}/", {})[name] = weight
        child = max(shares, key=lambda each: sum(shares[each].values()), default="")
        if not child or sum(shares[child].values()) * 2 <= sum(weights.values()):
            return here.rstrip("/") or "."
        here, inside = child, shares[child]


def _inside(folder: Path, leave: Iterable[Path]) -> Iterator[str]:
    """Yield the paths of `leave` that are below the folder, relative to it."""
    real = os.path.realpath(folder)
    for each in leave:
        relative = os.path.relpath(os.path.realpath(each), real)
        if relative != os.curdir and relative.partition("/")[0] != os.pardir:
            yield relative


def _tracked(folder: Path, below: str) -> Iterator[str]:
    """Yield git's list of files, with nested repositories (submodules, clones) replaced by their files."""
    for name in gitfacts.names(folder / below, "-c", "-o"):
        path = below + name.rstrip("/")
        if not _is_folder(folder / path):
            yield path
        elif os.path.lexists(folder / path / ".git"):
            yield from _tracked(folder, f"{path}/")


def _by_git(found: Survey, listed: Iterable[str], ignored: Iterable[str], beyond: frozenset[str]) -> None:
    for name in listed:
        if not _is_below(name, beyond):
            _add(found, name)
    crowds: dict[str, list[str]] = {}
    for name in _outermost(ignored, beyond):
        parent = name.rpartition("/")[0]
        if parent and not _is_cache(name):  # the top level is handled below
            crowds.setdefault(parent, []).append(name)
    for parent, inside in crowds.items():
        if len(inside) > LINKS_EACH:
            found.files = {name: size for name, size in found.files.items() if not name.startswith(f"{parent}/")}
            found.notes.append(f"{parent}: treated as data ({len(inside)} ignored files in it), so linked, not copied")
            found.links.append(parent)
        else:
            found.links += inside
    _link_top(found)
    found.links = _outermost(found.links, frozenset())


def _link_top(found: Survey) -> None:
    """Link the entries of the folder itself that contain no code: ignored by git, empty, or in `leave`."""
    code = {name.partition("/")[0] for name in found.files}
    with os.scandir(found.folder) as entries:
        names = sorted(entry.name for entry in entries)
    top = [name for name in names if name not in code and name not in NEITHER and not _is_cache(name)]
    found.links += top


def _walk(found: Survey, below: str, beyond: frozenset[str]) -> None:
    """Add the files below a folder without asking git."""
    try:
        with os.scandir(found.folder / below) as entries:
            inside = sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        found.notes.append(f"{below.rstrip('/') or found.folder}: skipped, because it cannot be read: {error.strerror}")
        return
    for entry in inside:
        path = below + entry.name
        if len(found.files) >= WALK_FILES:
            found.complete = False
            return
        if entry.name in NEITHER or _is_cache(entry.name):
            continue
        if path in beyond:
            found.links.append(path)
        elif not entry.is_dir(follow_symlinks=False):
            _add(found, path)
        elif entry.name.startswith(".") or any(os.path.lexists(f"{entry.path}/{each}") for each in ENVIRONMENTS):
            found.links.append(path)
        else:
            _walk(found, f"{path}/", beyond)


def _add(found: Survey, name: str) -> None:
    """Add a file or a symbolic link if it still exists."""
    try:
        status = (found.folder / name).lstat()
    except OSError:
        return  # the file was deleted, before or after git listed it
    if stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode):
        found.files[name] = status.st_size


def _outermost(names: Iterable[str], beyond: frozenset[str]) -> list[str]:
    """Return the paths of `names` and `beyond`, except those that are below another one."""
    kept: list[str] = []
    for name in sorted({*(name.rstrip("/") for name in names), *beyond}, key=lambda name: name.split("/")):
        if not kept or not _is_below(name, (kept[-1],)):
            kept.append(name)
    return kept


def _is_below(name: str, folders: Iterable[str]) -> bool:
    return any(name == folder or name.startswith(f"{folder}/") for folder in folders)


def _is_cache(name: str) -> bool:
    path = PurePosixPath(name)
    return path.name in CACHES or path.suffix == ".pyc"


def _is_folder(path: Path) -> bool:
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except OSError:
        return False
