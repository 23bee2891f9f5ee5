"""What a node must have for the program of a `command:` job to start there."""

import os
from typing import Final

from muster.launch.plan.interpreter import PYTHONS
from muster.launch.plan.plan import Context

STARTERS: Final = (*PYTHONS, "bash", "sh")  # of scripts


def replaced(context: Context) -> bool:
    """Tell whether the command begins with the chosen interpreter."""
    return context.interpreter is not None and bool(context.interpreter.words) and context.command[0] in PYTHONS


def needs(context: Context) -> tuple[str, str]:
    """Return the program (a path, or a name on PATH) and the path of the script that a node must have.

    "" stands for one that cannot be known before the ranks start: setup lines may bring it, or a container holds it.
    """
    if context.entry is not None:
        return "", ""
    program, script = context.argv[0], (context.command[1:2] or [""])[0]
    by_setup, ours = bool(context.site.setup or context.job.setup), replaced(context)
    if (by_setup or "PATH" in {**context.site.env, **context.job.env}) and not (ours and "/" in program):
        program = ""
    elif "/" in program:
        program = os.path.join(context.workdir, program)  # noqa: PTH118 (keeps "..")
    in_container = ours and context.interpreter is not None and len(context.interpreter.words) > 1
    is_script = context.command[0] in STARTERS and script.endswith((".py", ".sh"))
    if not is_script or by_setup or in_container:
        return program, ""
    return program, os.path.join(context.workdir, script)  # noqa: PTH118
