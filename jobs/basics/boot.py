"""Where our code is, and how a process of ours is started from it."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

# The folder that holds the package `muster`, as it is written: nodes may share the path, and not what a link on it
# leads to.
CODE_ROOT: Final = Path(os.path.abspath(__file__)).parents[3]  # noqa: PTH100 (Path.absolute keeps "..")


def module_argv(python: str, module: str, root: str | None = None) -> list[str]:
    """Return the argv that runs a module of ours, from this code or from the code at `root` (see launch/boot.py)."""
    return [python, "-I", f"{root or CODE_ROOT}/muster/launch/boot.py", module]


def job_argv(words: Sequence[str], module: str) -> list[str]:
    """Return the argv that runs a module of ours in a job's own Python, with the packages that this Python finds."""
    return [*words, f"{CODE_ROOT}/muster/launch/boot.py", module]


def importable(root: str | None = None) -> str:
    """Return the folder that shows a user's own Python the package `muster` of this code, or of `root`, and no more."""
    return f"{root or CODE_ROOT}/muster/importable"
