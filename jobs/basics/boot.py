"""The folder of Muster's code, and the command lines that run its modules."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

# The folder that contains `muster/`. Links stay unresolved, because on other nodes the same link may lead elsewhere.
CODE_ROOT: Final = Path(os.path.abspath(__file__)).parents[3]  # noqa: PTH100 (Path.absolute keeps "..")


def module_argv(python: str, module: str, root: str | None = None) -> list[str]:
    """Return the argv that runs a Muster module, from this code or from a copy at `root` (see launch/boot.py)."""
    return [python, "-I", f"{root or CODE_ROOT}/muster/launch/boot.py", module]


def job_argv(words: Sequence[str], module: str) -> list[str]:
    """Return the argv that runs a Muster module with a job's own Python command (`words`) and its packages."""
    return [*words, f"{CODE_ROOT}/muster/launch/boot.py", module]


def importable(root: str | None = None) -> str:
    """Return a folder for PYTHONPATH that makes only `muster` importable, from this code or from a copy at `root`."""
    return f"{root or CODE_ROOT}/muster/importable"
