"""The folder of Muster's code, and the command lines that run its modules."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

# The folder of the package `muster`, with links unresolved: other nodes may have the same path but other link targets.
CODE_ROOT: Final = Path(os.path.abspath(__file__)).parents[3]  # noqa: PTH100 (Path.absolute keeps "..")


def module_argv(python: str, module: str, root: str | None = None) -> list[str]:
    """Return the argv that runs a module of Muster, from this code or the code at `root` (see launch/boot.py)."""
    return [python, "-I", f"{root or CODE_ROOT}/muster/launch/boot.py", module]


def job_argv(words: Sequence[str], module: str) -> list[str]:
    """Return the argv that runs a module of Muster in a job's own Python, with that Python's packages."""
    return [*words, f"{CODE_ROOT}/muster/launch/boot.py", module]


def importable(root: str | None = None) -> str:
    """Return a folder for PYTHONPATH that makes only the package `muster`, from this code or `root`, importable."""
    return f"{root or CODE_ROOT}/muster/importable"
