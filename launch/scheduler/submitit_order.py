"""The instructions for submitit. Pure. `slurm/submitit_submit.py` reads them, `slurm/submitit_job.py` executes them."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from muster.jobs.basics.boot import module_argv
from muster.jobs.spec.slurm import SlurmSettings, seconds_of, split_option
from muster.launch.plan.spares import nodes_with_spares
from muster.launch.plan.submission import Submission
from muster.launch.scheduler.slurm_run import cores_of, settings_of
from muster.launch.transports.base import agent_argv
from muster.slurm.submitit_job import DRAIN_S, END_S, SubmititTask

OFTEN: Final = 1_000_000
AS_GIVEN: Final = ("mem", "partition", "account", "qos", "constraint", "nodelist", "exclude", "comment")
# A dead task must not end the others, because the supervisor decides. --export=ALL passes on all variables.
SRUN: Final = ("--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--cpu-bind=none", "--input=none", "--export=ALL")


def order(
    submissions: Sequence[Submission], *, name: str, limit: int | None = None, folder: Path | None = None
) -> dict[str, Any]:
    """Return the instructions for submitting runs with the same resources: one array if there are several.

    `limit`: the largest number of runs of the array that run at once. `folder`: for submitit's own files (default:
    inside the first run's folder).

    Raises:
        RefusedError: if the settings of job and site contradict each other.
    """
    context = submissions[0].context
    entry = module_argv(context.python, "muster.slurm.submitit_job", context.code)
    parameters = slurm_parameters(
        settings_of(context), nodes=nodes_with_spares(context.job), cores=cores_of(context.job), entry=entry
    )
    return {
        "folder": str(folder or context.run.submitit),
        # submitit ends a job after four time-outs. If a job has checkpoints, Muster instead ends it after several
        # allocations without a new one.
        "constructor": {"slurm_max_num_timeout": OFTEN} if context.job.checkpoint is not None else {},
        "parameters": {"name": name, **parameters, **({"slurm_array_parallelism": limit} if limit else {})},
        "tasks": [_words(task_of(each)) for each in submissions],
        "dry_run": False,
    }


def task_of(submission: Submission) -> SubmititTask:
    """Return the task of a run: the commands of supervisor and agent, and the run folder."""
    context, run = submission.context, str(submission.context.run.path)
    supervise = [*module_argv(context.python, "muster.launch.supervise", context.code), run]
    early_s = settings_of(context).signal_s - END_S
    return SubmititTask(supervise, agent_argv(context.python, context.code), run, max(DRAIN_S, early_s))


def slurm_parameters(settings: SlurmSettings, *, nodes: int, cores: int | None, entry: Sequence[str]) -> dict[str, Any]:
    """Convert the settings to submitit's parameters. `entry`: the command that replaces submitit's own for its tasks.

    `entry` is appended to srun's options, because submitit ignores its own parameter for it (`python`) in arrays.
    """
    cpus = settings.cpus_per_task or (None if settings.exclusive else cores)
    more: dict[str, Any] = {"no-kill": True, "requeue" if settings.requeue else "no-requeue": True, "chdir": "/"}
    more |= {name: True if value is None else value for name, value in map(split_option, settings.extra)}
    gpus = settings.gpus_per_node
    if isinstance(gpus, str):
        more["gpus-per-node"] = gpus
    if settings.reservation is not None:
        more["reservation"] = settings.reservation
    srun = [*SRUN, *([f"--cpus-per-task={cpus}"] if cpus else []), *entry]
    given = {
        "nodes": nodes,
        "tasks_per_node": 1,
        "cpus_per_task": cpus,
        "gpus_per_node": gpus if isinstance(gpus, int) else None,
        **{f"slurm_{name}": getattr(settings, name) for name in AS_GIVEN},
        "slurm_time": None if settings.time is None else math.ceil(seconds_of(settings.time) / 60),
        "slurm_exclusive": settings.exclusive or None,
        "slurm_signal_delay_s": settings.signal_s,
        "slurm_additional_parameters": more,
        "slurm_srun_args": srun,
    }
    return {name: value for name, value in given.items() if value is not None}


def _words(task: SubmititTask) -> dict[str, Any]:
    return {name: value for name, value in asdict(task).items() if not name.startswith("_")}
