"""The files that a node needs to start the ranks of a job: a program or a Python, and a script."""

import os
from typing import Final

from muster.launch.plan.interpreter import PYTHONS
from muster.launch.plan.plan import Context

STARTERS: Final = (*PYTHONS, "bash", "sh")  # programs that run a script given as their first argument


def replaced(context: Context) -> bool:
    """Return whether the chosen interpreter starts the ranks, as warm process or as their command's first word."""
    if context.interpreter is None or not context.interpreter.words:
        return False
    return context.entry is not None or context.command[0] in PYTHONS


def needs(context: Context) -> tuple[str, str]:
    """Return the program (a path, or a name on PATH) and the path of the script that a node must have.

    Either is "" if it cannot be known before the ranks start, because setup lines or a container may provide it.
    """
    program, script = (context.warm_python or ("",))[0], ""
    if context.entry is None:
        program, script = context.argv[0], (context.command[1:2] or [""])[0]
    by_setup, ours = context.has_setup, replaced(context)
    if (by_setup or "PATH" in {**context.site.env, **context.job.env}) and not (ours and "/" in program):
        program = ""
    elif "/" in program:
        program = os.path.join(context.workdir, program)  # noqa: PTH118 (keeps "..")
    in_container = ours and context.interpreter is not None and len(context.interpreter.words) > 1
    is_script = context.entry is None and context.command[0] in STARTERS and script.endswith((".py", ".sh"))
    if not is_script or by_setup or in_container:
        return program, ""
    return program, os.path.join(context.workdir, script)  # noqa: PTH118
