"""Checks that this machine can run a job: the number of ranks and nodes, and the files that the job reads."""

import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Final

from muster.jobs.basics.errors import RefusedError
from muster.jobs.basics.words import counted
from muster.jobs.data.datafiles import cifar10_files, data_root, text_file
from muster.jobs.spec.job import Job
from muster.jobs.spec.train import TrainSettings
from muster.jobs.timing.settings import TimingSettings
from muster.jobs.user import code
from muster.launch.common.program_files import fault
from muster.launch.plan.plan import Context
from muster.launch.plan.program import needs, replaced
from muster.launch.plan.spares import nodes_with_spares

LOCAL_NODES: Final = 256  # maximum number of pretend nodes, because each needs an agent and a warm process
LOCAL_RANKS: Final = 1024
CROWD: Final = 16  # ranks per core above which a warning is printed


def check_size(job: Job, cores: int) -> None:
    """Refuse a job that is too large for this machine, and warn if it may be slow.

    Raises:
        RefusedError: if the job has more pretend nodes or ranks than one machine may run.
    """
    nodes = nodes_with_spares(job)
    ranks = nodes * (1 if job.ranks_per_node == "slots" else job.ranks_per_node)
    if nodes > LOCAL_NODES:
        raise RefusedError(f"nodes: must be at most {LOCAL_NODES} on one machine, got {nodes}; lower nodes")
    if ranks > LOCAL_RANKS:
        raise RefusedError(
            f"ranks_per_node: at most {LOCAL_RANKS} ranks can run on one machine, got {nodes} nodes x "
            f"{job.ranks_per_node}; lower nodes or ranks_per_node"
        )
    have = f"this machine has {counted(cores, 'core')}"
    if ranks > CROWD * cores:
        warn(f"{ranks} ranks, but {have}: every rank will be slow, and memory may run out")
    if job.threads_per_rank != "auto" and job.threads_per_rank > cores:
        warn(f"threads_per_rank: {job.threads_per_rank}, but {have}: the threads will wait for each other")


@cache
def warn(text: str) -> None:
    """Print a warning, only once even if a command has several jobs."""
    print(f"muster: warning: {text}", file=sys.stderr)


def check_program(context: Context) -> None:
    """Check that the interpreter and the script of a `command:` job are on this machine.

    If the command begins with any other program, that program is not checked here.

    Raises:
        RefusedError: if the interpreter or script is missing or cannot be run.
    """
    program, script = needs(context)
    if (interpreter := context.interpreter) is None:
        return
    if replaced(context) and (found := fault(program, "", interpreter.folder)):
        file = "site file: " if context.job.python is None and context.site.python is not None else ""
        raise RefusedError(f"{file}python: {found}; correct it")
    if found := fault("", script, ""):
        raise RefusedError(f"command: {found}; correct the name, or set workdir to the folder that it is in")


def check_files(job: Job, environ: Mapping[str, str]) -> None:
    """Check that the files that the ranks will read are on this machine, before any rank is started.

    Raises:
        RefusedError: if the working folder, the text or the prepared data set is missing.
    """
    if job.workdir is not None and not Path(job.workdir).is_dir():
        found = "is not a folder" if Path(job.workdir).exists() else "no such folder"
        raise RefusedError(f"workdir: {job.workdir}: {found}; make it, or correct workdir")
    if not isinstance(job.settings, TrainSettings | TimingSettings):
        return
    for key, text in job.settings.makes.items():
        code.require_file(key, code.split(text)[0], Path(job.workdir or Path.cwd()))
    if isinstance(job.settings, TimingSettings):
        return
    if job.settings.data.text is not None:
        text_file(job.settings.data.text)
    elif job.settings.data.name == "cifar10":
        try:
            cifar10_files(data_root(environ))
        except RefusedError as error:
            raise RefusedError(f"train.data: {error}") from error
