"""Find what builds generated code: the code of torch.compile, and the launchers of Triton's kernels."""

import os
import shutil
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Final

COMPILERS: Final = {"cpu": ("g++", "clang++"), "cuda": ("gcc", "clang", "cc")}
VARIABLES: Final = {"cpu": "CXX", "cuda": "CC"}


def lacking(device: str, variables: Mapping[str, str] = os.environ) -> str:
    """Return what this machine lacks to build code for a type of device, and how to get it; "" if it lacks nothing."""
    variable = VARIABLES[device]
    names = (variables[variable],) if variables.get(variable) else COMPILERS[device]
    if not any(shutil.which(name) for name in names):
        return f"a compiler, but none of {', '.join(names)} is installed; install one or name it in {variable}"
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    if not header.is_file():
        return f"Python's headers, but {header} does not exist; install them (python3-dev)"
    return ""
