"""`python:` of a job or site file: the Python of the ranks, as a path, a name on PATH, or a list of words."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from muster.jobs.basics.files import expanded
from muster.jobs.spec import yamlfile
from muster.jobs.spec.passable import Passable


def _names_a_program(python: str | list[str]) -> str | list[str]:
    first = words_of(python)[0]
    if not first.strip():
        raise ValueError("names no program; give the path of an interpreter, or remove the key")
    if isinstance(python, str) and " " in python and "/" not in python.partition(" ")[0]:
        raise ValueError(f"several words must be a list; write python: {yamlfile.flow(python.split())}")
    return python


Python = Annotated[
    Passable | Annotated[list[Passable], Field(min_length=1)],
    AfterValidator(_names_a_program),
    Field(
        description="the Python of `command:` jobs, and in a job file also of `train:` jobs: a path, or several words "
        "such as `[apptainer, exec, image.sif, python]`"
    ),
]


def words_of(python: str | Sequence[str]) -> tuple[str, ...]:
    """Return the command line words that start this Python."""
    return (python,) if isinstance(python, str) else tuple(python)


def absolute(python: Any, folder: Path) -> Any:
    """If the program is a path, make it absolute, relative to `folder`. Return values of wrong types unchanged."""
    if isinstance(python, list) and python:
        return [absolute(python[0], folder), *python[1:]]
    return str(folder / expanded(python)) if isinstance(python, str) and "/" in python else python
