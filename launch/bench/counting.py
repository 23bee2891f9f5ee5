"""Count parameters, FLOPs, activations and optimizer state of a user's own model, in the ranks' Python.

This process therefore needs no torch.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from muster.jobs.basics.boot import module_argv
from muster.jobs.basics.errors import RefusedError
from muster.jobs.models.counted import Counted, read
from muster.jobs.spec.plain import spelled
from muster.jobs.spec.python import words_of

if TYPE_CHECKING:
    from muster.jobs.spec.job import Job
    from muster.jobs.spec.train import TrainSettings

TIMEOUT_S: Final = 300.0


@dataclass(frozen=True)
class OwnCode:
    """The counted model and optimizer of the user's code. A field is None if the code does not build that object."""

    model: Counted | None = None
    state_bytes: int | None = None  # optimizer state per parameter element


def own_code(job: "Job", settings: "TrainSettings", workdir: str | None = None) -> OwnCode:
    """Count the model and optimizer that the user's code builds, if the job names such code.

    `workdir` replaces the job's own working folder.

    Raises:
        RefusedError: if the code fails, or the ranks' Python has no torch.
    """
    if settings.model.make is None and settings.optimizer.make is None:
        return OwnCode()
    record = _asked(job, workdir or job.workdir or str(Path.cwd()))
    if "refused" in record:
        raise RefusedError(record["refused"])
    return OwnCode(None if record["model"] is None else read(record["model"]), record["state_bytes"])


def _asked(job: "Job", workdir: str) -> Mapping[str, Any]:
    words = (sys.executable,) if job.python is None else words_of(job.python)
    argv = [*words[:-1], *module_argv(words[-1], "muster.jobs.train.memory.meta")]
    try:
        done = subprocess.run(
            argv,
            input=json.dumps({"job": spelled(job)}),
            stdout=subprocess.PIPE,
            text=True,
            cwd=workdir,
            env={**os.environ, **job.env},
            timeout=TIMEOUT_S,
            check=False,
        )
    except OSError as error:
        raise RefusedError(
            f"python: cannot start {words[0]} in {workdir}: {error.strerror}; correct python: in the job"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise RefusedError(f"train: counting the user's model took longer than {TIMEOUT_S:g} s") from error
    if done.returncode:
        raise RefusedError(
            f"train: counting the model ended with exit code {done.returncode}; see the output of {words[0]} above"
        )
    record: Mapping[str, Any] = json.loads(done.stdout)
    return record
