"""Run a job's setup lines once on a node, before its ranks, in one shell that stops at the first failure.

Every rank of the node, in every attempt, starts with the environment as the lines changed it. Later entries win:

    the node's < Muster's, the site's and the job's env < changes by the setup lines < the rank's own variables
"""

import asyncio
import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from muster.jobs.basics.boot import importable
from muster.jobs.basics.errors import RefusedError
from muster.jobs.basics.files import open_log
from muster.jobs.machine import linux
from muster.launch.common.follow import tail_lines

Changes = dict[str, str | None]  # {name: value}; None: the lines have unset it
OF_THE_SHELL: Final = frozenset({"_", "SHLVL", "PWD", "OLDPWD"})
IMPORTABLE: Final = importable(".")[1:]  # how the PYTHONPATH entry that makes `muster` importable ends


async def run(lines: Sequence[str], log: Path, workdir: str, env: Mapping[str, str]) -> Changes:
    """Run the lines with bash, with their output in `log`. Return their changes to the environment.

    `env`: variables for the ranks in addition to the node's own. Cancelling this coroutine kills all processes that the
    lines started.

    Raises:
        RefusedError: if a line fails, or the environment after the lines cannot be read.
    """
    before = {**os.environ, **env}
    left = linux.memory_file("muster-environment")
    try:
        await _run_shell(f"{_trap(left)}; " + "\n".join(lines), log, workdir, before, left)
        return changes(before, _environment(left), env)
    finally:
        os.close(left)


async def _run_shell(script: str, log: Path, workdir: str, environ: Mapping[str, str], left: int) -> None:
    with os.fdopen(open_log(log), "wb") as output:
        output.truncate(0)
        shell = await asyncio.create_subprocess_exec(
            *("bash", "-e", "-c", script),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=workdir,
            env=environ,
            pass_fds=[left],
            start_new_session=True,
        )
    try:
        code = await shell.wait()
    except asyncio.CancelledError:
        linux.kill_quietly(shell.pid, signal.SIGKILL, group=True)
        raise
    if code:
        last = (tail_lines(log, 1) or ["no output"])[-1]
        raise RefusedError(f"setup: ended with code {code}: {last}; see {log}")


def changes(before: Mapping[str, str], after: Mapping[str, str], env: Mapping[str, str]) -> Changes:
    """Compare two environments. Omit changes to Muster's part of `env`: MUSTER_*, and PYTHONPATH's first folder."""
    found: Changes = {name: value for name, value in after.items() if before.get(name) != value}
    found |= {name: None for name in before if name not in after}
    ours = {name for name in env if name.startswith("MUSTER_")}
    found = {name: value for name, value in found.items() if name not in OF_THE_SHELL | ours}
    first = env.get("PYTHONPATH", "").partition(os.pathsep)[0]
    if "PYTHONPATH" in found and first.endswith(IMPORTABLE):
        behind = (found["PYTHONPATH"] or "").split(os.pathsep) if found["PYTHONPATH"] else []
        found["PYTHONPATH"] = os.pathsep.join([first, *(each for each in behind if each != first)])
    return found


def environ_after(environ: Mapping[str, str], changed: Changes) -> dict[str, str]:
    """Return an environment with the setup lines' changes."""
    return {name: value for name, value in {**environ, **changed}.items() if value is not None}


def with_changes(start: Mapping[str, Any], changed: Changes) -> dict[str, Any]:
    """Return the start order of a rank (jobs/node/rank_start.py) with the setup lines' changes."""
    env = {name: value for name, value in changed.items() if value is not None}
    return {**start, "env": {**env, **start["env"]}, "unset": [name for name in changed if changed[name] is None]}


def _trap(left: int) -> str:
    """Return the shell command that sets a trap: on exit, the shell writes its environment to a descriptor."""
    command = f"{shlex.quote(shutil.which('env') or '/usr/bin/env')} -0 >&{left}"
    return f"trap -- {shlex.quote(command)} EXIT"


def _environment(left: int) -> dict[str, str]:
    data = os.pread(left, os.fstat(left).st_size, 0)
    if not data:
        raise RefusedError(
            "setup: the lines replace the shell (exec) or its trap on EXIT, so the environment after them cannot "
            "be read; remove that line, or run it in a separate shell: bash -c '...'"
        )
    pairs = (os.fsdecode(each).partition("=") for each in data.split(b"\0")[:-1])
    return {name: value for name, _, value in pairs}
