"""Which code this is: a digest of Muster's own sources, so that nodes with other code are found before they start."""

import hashlib
import os
from functools import cache
from typing import Final

from jobs.boot import CODE_ROOT

PACKAGES: Final = ("cloudlab", "collectives_bench", "ddp", "jobs", "launch", "pipe", "slurm", "zero")
DIGITS: Final = 12


@cache
def fingerprint(root: str = str(CODE_ROOT)) -> str:
    """Return the first digits (hex) of a sha256 over every Python file of our packages, its path with it."""
    digest = hashlib.sha256()
    for package in PACKAGES:
        for folder, folders, files in os.walk(os.path.join(root, package)):  # noqa: PTH118 (in every agent's start)
            folders.sort()
            for name in sorted(files):
                if name.endswith(".py"):
                    path = os.path.join(folder, name)  # noqa: PTH118
                    with open(path, "rb") as file:  # noqa: PTH123
                        digest.update(f"{os.path.relpath(path, root)}\0".encode() + file.read() + b"\0")
    return digest.hexdigest()[:DIGITS]
