"""Choose the Python that runs the ranks. The choice is made where the job is submitted, and stored in the submission.

command:  the job's python:  >  the site's python:  >  the active virtual or conda environment  >  Muster's own
train:    the job's python:  >  Muster's own
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from muster.jobs.basics.errors import RefusedError
from muster.jobs.spec.job import CommandSettings, Job
from muster.jobs.spec.python import words_of
from muster.jobs.spec.site import Site

PYTHONS: Final = ("python", "python3")  # a command that begins with one of these names runs in the chosen interpreter
ENVIRONMENTS: Final = {"VIRTUAL_ENV": "virtual", "CONDA_PREFIX": "conda"}


@dataclass(frozen=True)
class Interpreter:
    """The Python of a job's ranks.

    `words` replace the first word of a command if that word is in `PYTHONS`, or start the warm process of a `train:`
    job. If they are empty, PATH on the node decides. `folder` is put first on PATH, so that programs of this Python's
    environment, such as torchrun, are found. If it is empty, PATH stays as it is.
    """

    words: tuple[str, ...]
    folder: str
    why: str

    def argv(self, command: Sequence[str]) -> list[str]:
        """Return the command that every rank of a `command:` job executes."""
        return [*self.words, *command[1:]] if self.words and command[0] in PYTHONS else list(command)


def choose(job: Job, site: Site, own: str, environ: Mapping[str, str] = os.environ) -> Interpreter | None:
    """Choose the Python of a job, or return None if the ranks run in Muster's own. `own`: Muster's Python on the nodes.

    Raises:
        RefusedError: if the job names a Python that its command does not use.
    """
    if not isinstance(job.settings, CommandSettings):
        return None if job.python is None else explicit(words_of(job.python), "job file: python")
    for file, python in (("job", job.python), ("site", site.python)):
        if python is None:
            continue
        chosen = explicit(words_of(python), f"{file} file: python")
        first = job.settings.argv[0]
        if file == "job" and first not in PYTHONS and not chosen.folder:
            raise RefusedError(f"python: has no effect on a command that begins with {first!r}; begin it with python")
        return chosen
    python, why = active(environ) or (own, "Muster's own: no virtual or conda environment is active here")
    folder = str(Path(python).parent)
    if "PATH" in {**site.env, **job.env}:
        return Interpreter((), "", "the first on the PATH that env: in the job or site file sets")
    if site.setup or job.setup:
        return Interpreter((), folder, f"the first on PATH after the setup lines; before them, {python} ({why})")
    return Interpreter((python,), folder, why)


def explicit(words: tuple[str, ...], why: str) -> Interpreter:
    """Return the interpreter that a file names. If it runs in a container, no folder is added to the node's PATH."""
    path = Path(words[0])
    is_python = path.is_absolute() and (len(words) == 1 or path.name.startswith("python"))
    return Interpreter(words, str(path.parent) if is_python else "", why)


def active(environ: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the Python of the active environment, and the reason. If two are active, the first on PATH counts."""
    path = environ.get("PATH", "").split(os.pathsep)
    found = []
    for variable, kind in ENVIRONMENTS.items():
        folder = os.path.abspath(f"{environ.get(variable)}/bin")  # noqa: PTH100 (keeps links, as PATH does)
        if environ.get(variable) and os.access(f"{folder}/python", os.X_OK):
            place = path.index(folder) if folder in path else len(path)
            found.append((place, f"{folder}/python", f"the {kind} environment that is active here: {variable}"))
    return min(found, key=lambda each: each[0])[1:] if found else None
