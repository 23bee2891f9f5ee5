"""Measure the layers of a job's model, in a process of the ranks' Python, so that this process needs no torch."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from muster.jobs.basics.boot import module_argv
from muster.jobs.basics.errors import RefusedError
from muster.jobs.spec.plain import spelled
from muster.jobs.spec.python import words_of

if TYPE_CHECKING:
    from muster.collectives_bench.cost.advice.measured import LayerTimes
    from muster.jobs.spec.job import Job

TIMEOUT_S: Final = 600.0
VARIANTS: Final[dict[str, dict[str, Any]]] = {
    "compile": {"compile": True},
    "cuda_graph": {"cuda_graph": True},
    "activation_checkpointing": {"activation_checkpointing": True},
}


def measure(job: "Job", ranks: int, samples: Sequence[int], options: Sequence[str]) -> "LayerTimes":
    """Time passes of these sizes with up to `ranks` processes at once on this machine, about half a minute.

    Raises:
        RefusedError: if the model cannot be built or timed, or the ranks' Python has no torch.
    """
    from muster.collectives_bench.cost.advice.measured import LayerTimes

    asked = {
        "job": spelled(job),
        "ranks": ranks,
        "samples": list(samples),
        "variants": {name: VARIANTS[name] for name in options},
        "threads": job.threads_per_rank if isinstance(job.threads_per_rank, int) else 1,
    }
    record = _asked(job, asked)
    if "refused" in record:
        raise RefusedError(record["refused"])
    return LayerTimes.model_validate_json(json.dumps({**record, "muster_layers": 1}))


def _asked(job: "Job", asked: Mapping[str, Any]) -> dict[str, Any]:
    words = (sys.executable,) if job.python is None else words_of(job.python)
    argv = [*words[:-1], *module_argv(words[-1], "muster.jobs.train.timing.layers")]
    folder = job.workdir or str(Path.cwd())
    try:
        done = subprocess.run(
            argv,
            input=json.dumps(asked),
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,
            env={**os.environ, **job.env},
            timeout=TIMEOUT_S,
            check=False,
        )
    except OSError as error:
        raise RefusedError(
            f"python: cannot start {words[0]} in {folder}: {error.strerror}; correct python: in the job"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise RefusedError(f"train: timing the model took longer than {TIMEOUT_S:g} s; give --times FILE") from error
    if done.returncode:
        raise RefusedError(
            f"train: timing the model ended with exit code {done.returncode}; see the output of {words[0]} above"
        )
    record: dict[str, Any] = json.loads(done.stdout)
    return record
