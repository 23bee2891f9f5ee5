"""What a node must have for the program of a `command:` job to start there."""

import os
from pathlib import Path
from typing import Final

from muster.launch.plan.interpreter import PYTHONS
from muster.launch.plan.plan import Context

SCRIPTS: Final = (".py", ".sh")


def replaced(context: Context) -> bool:
    """Tell whether the command begins with the chosen interpreter."""
    return context.interpreter is not None and bool(context.interpreter.words) and _command(context)[0] in PYTHONS


def needs(context: Context) -> tuple[str, str]:
    """Return the program (a path, or a name on PATH) and the path of the script that a node must have.

    "" stands for one that cannot be known before the ranks start: setup lines may bring it, or a container holds it.
    """
    if context.entry is not None:
        return "", ""
    argv, by_setup = context.argv, bool(context.site.setup or context.job.setup)
    ours = replaced(context)
    program = os.path.join(context.workdir, argv[0]) if "/" in argv[0] else argv[0]  # noqa: PTH118 (keeps "..")
    unknown = by_setup or "PATH" in {**context.site.env, **context.job.env}
    if unknown and not (ours and "/" in program):
        program = ""
    script = (_command(context)[1:2] or [""])[0]
    inside = ours and context.interpreter is not None and len(context.interpreter.words) > 1
    is_script = Path(script).suffix in SCRIPTS and _command(context)[0] in (*PYTHONS, "bash", "sh")
    known = is_script and not by_setup and not inside
    return program, os.path.join(context.workdir, script) if known else ""  # noqa: PTH118


def _command(context: Context) -> list[str]:
    command: list[str] = context.job.settings.model_dump()["argv"]
    return command
