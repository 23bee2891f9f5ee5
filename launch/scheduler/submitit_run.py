"""Submit runs to Slurm through submitit, whose tasks run `slurm/submitit_job.py`.

One sbatch submits a run, or an array of several (queueing.py). Then they are like any run in Slurm's queue
(slurm_follow.py).
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from muster.jobs.basics.boot import module_argv
from muster.jobs.basics.errors import MusterError, RefusedError, StartTimeoutError
from muster.jobs.basics.reading import parse_json
from muster.launch.plan.submission import Submission
from muster.launch.scheduler.slurm_run import environment_of
from muster.launch.scheduler.submitit_order import order
from muster.slurm.client import SubmissionRefusedError

SUBMIT_S: Final = 90.0


def script(submission: Submission) -> str:
    """Return the script that submitit would submit with sbatch.

    Raises:
        RefusedError: if submitit is not installed, or Slurm is not on this machine.
    """
    wanted = order([submission], name=submission.context.run.run_id) | {"dry_run": True}
    return str(_call(wanted, environment_of(submission))["text"])


def send(submissions: Sequence[Submission], *, name: str, limit: int | None, folder: Path | None) -> list[str]:
    """Make submitit submit runs with the same resources to Slurm; return their job ids. Arguments as for `order`.

    Raises:
        SubmissionRefusedError: if sbatch refuses.
        RefusedError: if submitit is not installed, or Slurm is not on this machine.
        StartTimeoutError: if the controller does not answer.
    """
    told = _call(order(submissions, name=name, limit=limit, folder=folder), environment_of(submissions[0]))
    if said := told.get("refused"):
        raise SubmissionRefusedError(str(said))
    return [str(each) for each in told["job_ids"]]


def _call(wanted: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
    if shutil.which("srun", path=environment.get("PATH")) is None:  # submitit refuses with a traceback
        raise RefusedError("slurm: srun is not on PATH here; run this on the cluster's login node")
    process = subprocess.Popen(
        module_argv(sys.executable, "muster.slurm.submitit_submit"),
        env=environment,
        cwd="/",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        out, said = process.communicate(json.dumps(wanted).encode(), timeout=SUBMIT_S)
    except subprocess.TimeoutExpired as error:
        process.kill()
        process.communicate()
        raise StartTimeoutError(f"submitit: did not submit within {SUBMIT_S:g} s; see squeue") from error
    if process.returncode or not out:
        raise _failure(said.decode(errors="replace"), process.returncode)
    answer: dict[str, Any] = parse_json(out)
    return answer


def _failure(said: str, code: int) -> MusterError:
    """Turn the last line printed by `submitit_submit` into the error that it describes."""
    last = next((line for line in reversed(said.splitlines()) if line.strip()), "")
    error = MusterError(last.removeprefix("muster: ") or f"submitit ended with code {code}")
    error.exit_code = code if code > 0 else 1
    return error
