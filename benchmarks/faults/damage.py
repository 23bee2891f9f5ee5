"""Ways to damage a file of a checkpoint, at a random place; `other` is the same file of an older checkpoint."""

import os
import random
import shutil
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path

from muster.jobs.runfolder.checkpointdir import CheckpointDir

HOLE_BYTES = 4096
HEAD_BYTES = 512  # where the layout is told
Damage = Callable[[Path, Path, random.Random], None]


def file_of(folder: CheckpointDir, which: str) -> Path:
    """Return a file of a checkpoint: `shard(1)`, `manifest`."""
    name, _, number = which.rstrip(")").partition("(")
    found = attrgetter(name)(folder)
    path: Path = found(int(number)) if number else found
    return path


def flip(path: Path, other: Path, draw: random.Random, *, among: int | None = None) -> None:
    """Change one bit, of the first `among` bytes."""
    data = bytearray(path.read_bytes())
    data[draw.randrange(len(data[:among]))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


def flip_header(path: Path, other: Path, draw: random.Random) -> None:
    """Change one bit among the first bytes."""
    flip(path, other, draw, among=HEAD_BYTES)


def flip_pending(path: Path, other: Path, draw: random.Random) -> None:
    """Change one bit of an `.ok` before the commit, which the supervisor would then make."""
    path.with_name("MANIFEST.json").unlink()
    flip(path, other, draw)


def truncate(path: Path, other: Path, draw: random.Random) -> None:
    """Cut the end off."""
    os.truncate(path, draw.randrange(path.stat().st_size))


def hole(path: Path, other: Path, draw: random.Random) -> None:
    """Let a block read as zeros, as after a crash."""
    data = bytearray(path.read_bytes())
    at = draw.randrange(max(len(data) - HOLE_BYTES, 1))
    data[at : at + HOLE_BYTES] = bytes(len(data[at : at + HOLE_BYTES]))
    path.write_bytes(data)


def generation(path: Path, other: Path, draw: random.Random) -> None:
    """Put the older checkpoint's file in its place: as whole as can be, and of another step."""
    shutil.copyfile(other, path)


def missing(path: Path, other: Path, draw: random.Random) -> None:
    """Remove it."""
    path.unlink()
