"""Locate and prepare the data sets on a machine. Torch-free.

    MUSTER_DATA, else $XDG_CACHE_HOME/muster, else ~/.cache/muster
      cifar10/          train.u8  test.u8   rows of 1 label byte and 3072 pixels, planar RGB
                        meta.json           samples, names of the labels, sha256 of both files; written last
      python-source/    python-3.11.7.u8    the standard library's *.py files, concatenated
                        python-3.11.7.json  sha256, bytes, files, version; written last

Files are written under a temporary name and renamed. Only one process at a time prepares a data set.
"""

import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from platform import python_version
from typing import Any, Final

from muster.jobs.basics.errors import RefusedError, StorageError
from muster.jobs.basics.files import expanded
from muster.jobs.basics.files import locked as lock_file
from muster.jobs.basics.reading import read_json

DATA_VARIABLE: Final = "MUSTER_DATA"
DIGITS: Final = Path(__file__).parents[1] / "train" / "data" / "digits" / "digits.u8"
CIFAR10_URL: Final = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
CIFAR10_MD5: Final = "c58f30108f718f92721af3b95e74349a"

LOCK_WAIT_S: Final = 60.0
CHUNK_BYTES: Final = 2**20

NOT_SOURCE: Final = frozenset(
    ["site-packages", "dist-packages", "test", "tests", "idlelib", "turtledemo", "lib2to3", "ensurepip", "__pycache__"]
)


@dataclass(frozen=True)
class DataFile:
    """A prepared file; `sha256` is the value in the JSON file beside it."""

    path: Path
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Cifar10Files:
    """The two parts of CIFAR-10 on this machine."""

    train: Path
    test: Path
    meta: Path


def data_root(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder for data sets on this machine, even if it does not exist yet."""
    if given := environ.get(DATA_VARIABLE):
        return expanded(given).absolute()
    cache = environ.get("XDG_CACHE_HOME") or "~/.cache"
    return expanded(cache).absolute() / "muster"


def cifar10_files(root: Path) -> Cifar10Files:
    """Return the files of a prepared CIFAR-10.

    Raises:
        RefusedError: if CIFAR-10 has not been prepared.
    """
    folder = root / "cifar10"
    files = Cifar10Files(folder / "train.u8", folder / "test.u8", folder / "meta.json")
    if not all(path.is_file() for path in (files.train, files.test, files.meta)):
        raise RefusedError(
            f"{folder}: cifar10 is not on this machine; run: muster data cifar10, or without a network: "
            f"muster data cifar10 --archive {Path(CIFAR10_URL).name}"
        )
    return files


def text_file(given: str) -> Path:
    """Return the path of a user's text, after checking that it exists, is readable and is not empty.

    Raises:
        RefusedError: if one of these checks fails.
    """
    path = expanded(given).absolute()
    if not path.is_file():
        found = "a folder" if path.is_dir() else "no such file"
        raise RefusedError(f"train.data.text: {path}: {found}; give a file that every node can read")
    if not os.access(path, os.R_OK):
        raise RefusedError(f"train.data.text: {path}: this user may not read it; change its permissions")
    if path.stat().st_size == 0:
        raise RefusedError(f"train.data.text: {path}: the file is empty; give one with text")
    return path


def prepare_python_source(root: Path, library: Path | None = None) -> DataFile:
    """Write the source of this Python's standard library to one file, unless that was done before; return the file.

    Raises:
        RefusedError: if the library's source is not installed.
        StorageError: if the file cannot be written.
    """
    library = library or Path(sysconfig.get_path("stdlib"))
    folder, name = root / "python-source", f"python-{python_version()}"
    text, sidecar = folder / f"{name}.u8", folder / f"{name}.json"
    if ready := _ready(text, sidecar):
        return ready
    with locked(folder, wait_s=LOCK_WAIT_S):
        if ready := _ready(text, sidecar):  # another rank has prepared the file meanwhile
            return ready
        sources = list(python_sources(library))
        if not sources:
            raise RefusedError(f"{library}: no *.py files here; install the library's source, or set train.data.text")
        with written(text) as temporary, temporary.open("wb") as file:
            for source in sources:
                file.write(source.read_bytes())
        made = DataFile(text, text.stat().st_size, sha256_of(text))
        facts = {"sha256": made.sha256, "bytes": made.bytes, "files": len(sources), "python": python_version()}
        write_facts(sidecar, facts)
        return made


def python_sources(library: Path) -> Iterator[Path]:
    """Yield the library's own *.py files, sorted by relative path, without tests, tools and machine-specific files.

    _sysconfigdata*, config-* and sitecustomize.py are written when Python is built or installed, so they differ between
    machines with the same library.
    """
    found: list[Path] = []
    for folder, folders, names in os.walk(library):
        folders[:] = set(folders) - NOT_SOURCE  # do not descend into these
        found += (Path(folder, name).relative_to(library) for name in names if name.endswith(".py"))
    for path in sorted(found, key=Path.as_posix):
        of_machine = path.name == "sitecustomize.py" or path.parts[0].startswith(("_sysconfigdata", "config-"))
        if not of_machine and (library / path).is_file():
            yield library / path


def sha256_of(*paths: Path) -> str:
    """Return the SHA-256 of the concatenated files, in hex."""
    digest = hashlib.sha256()
    buffer = bytearray(CHUNK_BYTES)
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                digest.update(memoryview(buffer)[:count])
    return digest.hexdigest()


def write_facts(path: Path, facts: dict[str, Any]) -> None:
    """Write the JSON file that describes a prepared file, by rename.

    Raises:
        StorageError: if the file cannot be written.
    """
    with written(path) as temporary:
        temporary.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


@contextmanager
def written(path: Path) -> Iterator[Path]:
    """Yield a temporary name beside `path`; rename it to `path` on success, else remove it.

    Raises:
        StorageError: if the disk is full or the folder cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        temporary.replace(path)
    except OSError as error:
        raise storage_error(path, error) from error
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def locked(folder: Path, *, wait_s: float) -> Iterator[None]:
    """Create a folder and lock it during the block. The kernel releases the lock if this process dies.

    Raises:
        StorageError: if the folder cannot be written, or another process keeps the lock for all of `wait_s`.
    """
    lock = folder / ".lock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise storage_error(lock, error) from error
    try:
        held = True
        with suppress(OSError):  # without locks, two processes may do the same work, but renaming keeps files complete
            held = lock_file(descriptor, wait_s)
        if not held:
            raise StorageError(f"{lock}: another process is preparing this data; wait until it has ended")
        yield
    finally:
        os.close(descriptor)


def storage_error(path: Path, error: OSError) -> StorageError:
    """Convert the OSError of a write to the data folder to an error whose message states what to do."""
    return StorageError(
        f"{path}: cannot write here: {error.strerror or error}; free some space, or set {DATA_VARIABLE} to a folder "
        "on another disk"
    )


def _ready(path: Path, sidecar: Path) -> DataFile | None:
    try:
        facts = read_json(sidecar, owned=False)
        file = DataFile(path, int(facts["bytes"]), str(facts["sha256"]))
        return file if path.stat().st_size == file.bytes else None
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None
