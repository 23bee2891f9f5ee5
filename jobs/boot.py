"""Where our code is, and how a process of ours is started from it."""

import os
from pathlib import Path
from typing import Final

# As it is written, links not followed: nodes may share the path, and not what lies behind it.
CODE_ROOT: Final = Path(os.path.abspath(__file__)).parent.parent  # noqa: PTH100 (Path.absolute keeps "..")


def module_argv(python: str, module: str, root: str | None = None) -> list[str]:
    """Return the argv that runs a module of ours, from this code or from the code at `root` (see launch/boot.py)."""
    return [python, "-I", f"{root or CODE_ROOT}/launch/boot.py", module]
