"""The state of a box: one JSON file, written before anything is created, and a lock for commands that change it.

The lock is the folder itself. Anybody who can open a folder can hold its lock, so other users may traverse a locked
folder and read files in it by name, but cannot open it.
"""

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from muster.cloudlab.box import paths as places
from muster.cloudlab.box.paths import BoxPaths
from muster.cloudlab.box.spec import BoxSpec, Rates
from muster.jobs.basics.errors import RefusedError
from muster.jobs.basics.files import locked
from muster.jobs.basics.reading import parse_json, read_bytes
from muster.jobs.machine.procfs import boot_id as boot_id

VERSION: Final = 2
PREFIX: Final = "box-"
LOCK: Final = "lock"
LOCK_S: Final = 120.0
PRIVATE: Final = 0o711


@dataclass(frozen=True)
class BoxState:
    """The last written state of a box."""

    spec: BoxSpec
    rates: Rates
    boot: str  # boot id of the machine when the box was made
    complete: bool = False  # False: the box is being made, or its creation was interrupted
    made_folders: tuple[str, ...] = ()  # folders created outside the box's own folder
    faketime: str = ""
    programs: dict[str, str] = field(default_factory=dict)

    @property
    def is_stale(self) -> bool:
        """True if the machine has rebooted since, so that the box's processes and links are gone."""
        return self.boot != boot_id()


def write_state(state: BoxState) -> None:
    """Write the state of a box atomically."""
    path = BoxPaths.of(state.spec.name).state
    fresh = path.with_suffix(".new")
    with fresh.open("w", encoding="utf-8") as file:
        file.write(_to_json(state))
        file.flush()
        os.fsync(file.fileno())
    fresh.rename(path)


def read_state(name: str) -> BoxState | None:
    """Return the state of a box; None if there is no box, or its creation ended before the first write.

    Raises:
        RefusedError: if the file cannot be read.
    """
    path = BoxPaths.of(name).state
    try:
        return _from_json(read_bytes(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except PermissionError as error:
        raise RefusedError(f"{path}: you may not read it, because a box belongs to root; use sudo") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RefusedError(f"{path}: cannot be parsed ({error}); remove it, then run: sudo muster box down") from error


def box_names() -> list[str]:
    """List the names of all boxes that have a folder."""
    try:
        found = [entry.name for entry in places.ROOT.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(name.removeprefix(PREFIX) for name in found if name.startswith(PREFIX))


@contextmanager
def root_lock() -> Iterator[None]:
    """Create the root folder, hold the lock of all boxes, and remove the folder at the end if it is empty.

    The lock is a separate folder, because every user can open the root folder, and could therefore lock it.
    """
    place = places.ROOT / LOCK
    while True:
        places.ROOT.mkdir(mode=0o755, parents=True, exist_ok=True)
        with suppress(FileNotFoundError):  # another command has just removed the root folder
            place.mkdir(mode=PRIVATE, exist_ok=True)
        with locked_folder(place) as lock:
            if lock is None:
                continue
            yield
            if list(places.ROOT.iterdir()) == [place]:
                place.rmdir()
                with suppress(OSError):  # not empty: another command has begun, and will remove the folder
                    places.ROOT.rmdir()
            return


@contextmanager
def locked_folder(folder: Path) -> Iterator[int | None]:
    """Hold the lock of a folder. Yield its descriptor, or None if the folder is gone once the lock is held.

    While the lock is held, the umask is 022, because jobs of other users and the user who called sudo read the new
    files.

    Raises:
        RefusedError: if another command holds the lock for too long.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        yield None
        return
    umask = os.umask(0o022)
    try:
        # With older versions of Muster, every user could open the folder.
        os.fchmod(descriptor, stat.S_IMODE(os.fstat(descriptor).st_mode) & PRIVATE)
        if not locked(descriptor, LOCK_S):
            raise RefusedError(f"{folder}: another muster box command has been working on it for {LOCK_S:.0f} s")
        yield descriptor if _is_same(descriptor, folder) else None
    finally:
        os.umask(umask)
        os.close(descriptor)


def _is_same(descriptor: int, folder: Path) -> bool:
    try:
        return folder.stat().st_ino == os.fstat(descriptor).st_ino
    except FileNotFoundError:
        return False


def _to_json(state: BoxState) -> str:
    data: dict[str, Any] = {"version": VERSION, **asdict(state)}
    data["rates"]["pairs"] = [[*pair, rate] for pair, rate in state.rates.pairs.items()]
    return json.dumps(data, indent=1) + "\n"


def _from_json(text: bytes) -> BoxState:
    raw = parse_json(text)
    if (version := raw.pop("version")) != VERSION:
        raise ValueError(f"version {version}, expected {VERSION}")
    spec, rates, made = BoxSpec(**raw.pop("spec")), raw.pop("rates"), tuple(raw.pop("made_folders"))
    rates["pairs"] = {(one, other): rate for one, other, rate in rates["pairs"]}
    return BoxState(spec, Rates(**rates), made_folders=made, **raw)
