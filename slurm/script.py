"""Write the batch script of a run, or of an array of runs. It contains no user input except sbatch options. Pure.

    #SBATCH lines   the requests to Slurm, one option each
    trap '' USR1 USR2         ignore both until the supervisor handles them
    exec python -I .../boot.py launch.supervise RUN_FOLDER     replaces the shell

Slurm sends its early signal to the shell (`B:`), so the signal reaches the supervisor that has replaced the shell.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from muster.jobs.basics.errors import RefusedError
from muster.jobs.basics.exits import REFUSED
from muster.jobs.spec.slurm import SlurmSettings, split_option
from muster.slurm.allocation import clean_environment

OUTPUT: Final = "slurm-%j.out"
ARRAY_OUTPUT: Final = "slurm-%A_%a.out"

# Options whose names are those of their settings.
_AS_GIVEN: Final = (
    *("mem", "gpus-per-node", "time", "partition", "account", "qos", "constraint", "reservation", "nodelist"),
    *("exclude", "comment"),
)
# Variables of sbatch that would override the script's own lines.
_VARIABLES: Final = {
    "account": ("SBATCH_ACCOUNT",),
    "constraint": ("SBATCH_CONSTRAINT",),
    "exclusive": ("SBATCH_EXCLUSIVE",),
    "gpus-per-node": ("SBATCH_GPUS_PER_NODE",),
    "mem": ("SBATCH_MEM_PER_NODE", "SBATCH_MEM_PER_CPU", "SBATCH_MEM_PER_GPU"),
    "partition": ("SBATCH_PARTITION",),
    "qos": ("SBATCH_QOS",),
    "reservation": ("SBATCH_RESERVATION",),
    "time": ("SBATCH_TIMELIMIT",),
}
_NEVER: Final = (
    *("SBATCH_ARRAY_INX", "SBATCH_JOB_NAME", "SBATCH_NO_KILL", "SBATCH_NO_REQUEUE", "SBATCH_REQUEUE", "SBATCH_SIGNAL"),
    *("SBATCH_OPEN_MODE", "SBATCH_OUTPUT", "SBATCH_ERROR", "SBATCH_INPUT", "SBATCH_EXPORT", "SBATCH_WAIT"),
    *("SBATCH_GPUS", "SBATCH_GPUS_PER_TASK"),
)


@dataclass(frozen=True)
class Option:
    """One option of sbatch; the value is None for a flag."""

    name: str
    value: str | None = None

    def line(self) -> str:
        """Format the option as a line of a batch script."""
        return f"#SBATCH --{self.name}" + ("" if self.value is None else f"={quoted(self.value)}")


@dataclass(frozen=True)
class Array:
    """Many runs as one job array: element k runs the run folder in line k + 1 of `points`; at most `limit` at once."""

    points: Path
    count: int
    limit: int | None = None


def sbatch_text(
    *,
    name: str,
    folder: Path,
    nodes: int,
    argv: Sequence[str],
    settings: SlurmSettings,
    cpus_per_task: int | None = None,
    array: Array | None = None,
) -> str:
    """Return the text of a batch script.

    Args:
        name: the id of the run.
        folder: where Slurm writes the output.
        argv: the command that supervises the run; for an array, without the last word, which is the run folder.
        cpus_per_task: used if the settings do not set it.

    Raises:
        RefusedError: if the name of the folder cannot be written in a script line.
    """
    options = options_of(
        name=name, folder=folder, nodes=nodes, settings=settings, cpus_per_task=cpus_per_task, array=array
    )
    body = f"exec {shlex.join(argv)}" if array is None else _array_body(argv, array.points)
    # Ignore both signals, which would end the shell, until the supervisor handles them.
    return "\n".join(["#!/bin/sh", *(option.line() for option in options), "", "trap '' USR1 USR2", body, ""])


def options_of(
    *,
    name: str,
    folder: Path,
    nodes: int,
    settings: SlurmSettings,
    cpus_per_task: int | None = None,
    array: Array | None = None,
) -> list[Option]:
    """List the sbatch options of a batch script.

    Raises:
        RefusedError: if the name of the folder cannot be written in a script line.
    """
    # If a path contains a backslash, Slurm uses it literally, and %j would not be replaced.
    if not str(folder).isprintable() or "\\" in str(folder):
        raise RefusedError(
            f"run folder: {str(folder)!r}: Slurm needs a path of printable characters, without backslashes; choose "
            "another with --runs DIR"
        )
    asked = {
        "job-name": name,
        "chdir": str(folder),
        # Slurm replaces %x in the whole path, even in the part that it prepends to a relative path.
        "output": f"{folder}/".replace("%", "%%") + (OUTPUT if array is None else ARRAY_OUTPUT),
        "open-mode": "append",
        "nodes": nodes,
        "ntasks-per-node": 1,
        "cpus-per-task": settings.cpus_per_task or (None if settings.exclusive else cpus_per_task),
        **{option: getattr(settings, option.replace("-", "_")) for option in _AS_GIVEN},
        "signal": f"B:USR2@{settings.signal_s}",
        "array": None if array is None else f"0-{array.count - 1}" + (f"%{array.limit}" if array.limit else ""),
    }
    options = [Option(option, str(value)) for option, value in asked.items() if value is not None]
    options += [Option("exclusive")] * settings.exclusive
    options += [Option("no-kill"), Option("requeue" if settings.requeue else "no-requeue")]
    return options + [Option(*split_option(extra)) for extra in settings.extra]


def overriding_variables(options: Sequence[Option]) -> frozenset[str]:
    """Return the variables whose values would override options of the script."""
    written = {option.name for option in options}
    return frozenset(_NEVER).union(*(names for option, names in _VARIABLES.items() if option in written))


def job_environment(options: Sequence[Option], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a job: without rank or job variables, and without variables that override `options`."""
    dropped = overriding_variables(options)
    return {name: value for name, value in clean_environment(environ).items() if name not in dropped}


def quoted(value: str) -> str:
    """Quote a value for an #SBATCH line. Unlike in a shell, a backslash is also special within single quotes."""
    if re.fullmatch(r"[\w@%+=:,./*&|()\[\]-]+", value, re.ASCII):
        word = value
    else:
        word = '"' + re.sub(r'(["\\])', r"\\\1", value) + '"'
    # sbatch removes the word packjob (in newer versions hetjob) anywhere in a line, so a backslash splits it.
    return re.sub(r"(?i)(pack|het)(job)", r"\1\\\2", word)


def _array_body(argv: Sequence[str], points: Path) -> str:
    file = shlex.quote(str(points))
    missing = shlex.quote(f"muster: {points}: has no run folder for this element of the array")
    return "\n".join(
        [
            f'run=$(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" {file})',
            f'if [ -z "$run" ]; then printf "%s\\n" {missing} >&2; exit {REFUSED}; fi',
            f'exec {shlex.join(argv)} "$run"',
        ]
    )
