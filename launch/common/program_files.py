"""What keeps this machine from starting a program."""

import os
import shutil
from pathlib import Path


def fault(program: str, script: str, folder: str) -> str:
    """Say which file of a program (a path or a name), or the script that it is given, is missing; "" if none is.

    A name is looked for in `folder`, then on PATH. "" asks for nothing.
    """
    if "/" in program:
        if not Path(program).is_file():
            return f"{program}: no such file"
        if not os.access(program, os.X_OK):
            return f"{program}: is not executable"
    elif program:
        path = os.pathsep.join(filter(None, (folder, os.environ.get("PATH", os.defpath))))
        if shutil.which(program, path=path) is None:
            return f"{program}: not found on PATH"
    return f"{script}: no such file" if script and not Path(script).is_file() else ""
