"""Start a prepared job on this machine and supervise it to its verdict."""

import asyncio
import os
import sys
from importlib.util import find_spec

from jobs.errors import RefusedError
from jobs.rundir import make_run, write_text
from launch.console import Console
from launch.plan import preload, shared_environment
from launch.prepare import Prepared, this_machine
from launch.supervisor import Supervisor
from launch.transports.local import Local
from launch.verdict import Verdict


def start_local(prepared: Prepared, *, quiet: bool = False, tcp: bool = False) -> Verdict:
    """Make the run folder, start the warm process at once, then everything else.

    Raises:
        RunFolderError, StorageError: the run folder cannot be written; nothing was started.
    """
    context = prepared.context
    if context.entry is not None and context.python == sys.executable and find_spec("torch") is None:
        raise RefusedError(f"{context.python}: has no torch, which a {context.job.kind}: job needs; run ./setup.sh")
    make_run(context.run)
    write_text(context.run.job, prepared.job_text)
    write_text(context.run.site, prepared.site_text)
    threads = context.job.threads_per_rank
    number = max(1, len(this_machine().cores) // context.placement.world_size) if threads == "auto" else threads
    environment = {each.name: each.value for each in shared_environment(context, os.environ, number)}
    transport = Local(len(context.placement.nodes), python=context.python, tcp=tcp)
    transport.warm_up(preload(context), environment)
    return asyncio.run(Supervisor(context, transport, Console(quiet=quiet)).run())
