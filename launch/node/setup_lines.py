"""Run a job's setup lines once on a node, before its ranks: one shell that stops at the first failure."""

import asyncio
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from muster.jobs.basics.errors import RefusedError
from muster.jobs.basics.files import open_log
from muster.jobs.machine import linux
from muster.launch.common.follow import tail_lines


async def run(lines: Sequence[str], log: Path, workdir: str, env: Mapping[str, str]) -> None:
    """Run the lines with bash; their output goes to `log`. When this is cancelled, all that they started is killed.

    Raises:
        RefusedError: a line failed.
    """
    with os.fdopen(open_log(log), "wb") as output:
        output.truncate(0)
        shell = await asyncio.create_subprocess_exec(
            *("bash", "-e", "-c", "\n".join(lines)),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=workdir,
            env={**os.environ, **env},
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
