"""Ask a module in a process of the ranks' Python, so that this process needs no torch."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from muster.jobs.basics.boot import module_argv
from muster.jobs.basics.errors import RefusedError
from muster.jobs.spec.plain import spelled
from muster.jobs.spec.python import words_of

if TYPE_CHECKING:
    from muster.jobs.spec.job import Job


def ask(
    job: "Job", module: str, request: Mapping[str, Any], *, folder: str, timeout_s: float, doing: str
) -> dict[str, Any]:
    """Return the module's answer to a request about a job. The module runs in `folder`, and reads the job, too.

    `doing` names the work in messages, such as "timing the model".

    Raises:
        RefusedError: if the process cannot start, fails or takes too long, or refuses the job.
    """
    words = (sys.executable,) if job.python is None else words_of(job.python)
    try:
        done = subprocess.run(
            [*words[:-1], *module_argv(words[-1], module)],
            input=json.dumps({"job": spelled(job), **request}),
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,
            env={**os.environ, **job.env},
            timeout=timeout_s,
            check=False,
        )
    except OSError as error:
        raise RefusedError(
            f"python: cannot start {words[0]} in {folder}: {error.strerror}; correct python: in the job"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise RefusedError(f"train: {doing} took longer than {timeout_s:g} s") from error
    if done.returncode:
        raise RefusedError(f"train: {doing} ended with exit code {done.returncode}; see the output of {words[0]} above")
    record: dict[str, Any] = json.loads(done.stdout)
    if "refused" in record:
        raise RefusedError(record["refused"])
    return record
