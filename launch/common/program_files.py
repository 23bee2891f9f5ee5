"""A check that this machine can start a program."""

# ruff: noqa: PTH113

import os
import shutil
from os.path import isfile  # pathlib's is_file raises if a name is too long


def fault(program: str, script: str, folder: str) -> str:
    """Return why a program (a path or a name) or its script cannot be started; "" if both can.

    A name is searched for in `folder`, then on PATH. An empty `program` or `script` is not checked.
    """
    if "/" in program:
        if not isfile(program):
            return f"{program}: no such file"
        if not os.access(program, os.X_OK):
            return f"{program}: is not executable"
    elif program:
        path = os.pathsep.join(filter(None, (folder, os.environ.get("PATH", os.defpath))))
        if shutil.which(program, path=path) is None:
            return f"{program}: not found on PATH"
    return f"{script}: no such file" if script and not isfile(script) else ""
