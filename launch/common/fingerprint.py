"""A digest of Muster's own sources, used to find nodes with different code before anything starts."""

import hashlib
import os
from functools import cache
from typing import Final

from muster.jobs.basics.boot import CODE_ROOT

PACKAGE: Final = "muster"
DIGITS: Final = 12


@cache
def fingerprint(root: str = str(CODE_ROOT)) -> str:
    """Return the first hex digits of a SHA-256 digest of the paths and contents of all Python files below `root`."""
    digest = hashlib.sha256()
    for folder, folders, files in os.walk(os.path.join(root, PACKAGE), followlinks=True):  # noqa: PTH118
        folders.sort()
        for name in sorted(files):
            if name.endswith(".py"):
                path = os.path.join(folder, name)  # noqa: PTH118
                with open(path, "rb") as file:  # noqa: PTH123
                    digest.update(f"{os.path.relpath(path, root)}\0".encode() + file.read() + b"\0")
    return digest.hexdigest()[:DIGITS]
