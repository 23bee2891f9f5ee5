"""Call submitit in a separate process, to keep its modules, threads and children out of Muster's process.

standard input    {"folder", "constructor", "parameters", "tasks", "dry_run"}, as JSON
standard output   {"job_ids": [...]} or {"refused": sbatch's message} or {"text": the batch script}
"""

import json
import math
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any, Final

from muster.jobs.basics import exits
from muster.slurm.submitit_job import SubmititTask

if TYPE_CHECKING:
    import submitit

QUERY_S: Final = 30.0
YEAR_MINUTES: Final = 525_600
LIMITS: Final = "%P|%L|%l"  # format of sinfo: partition (a star marks the default one), default time limit, time limit


def main() -> int:
    """Read an order from standard input, submit it, and write the answer."""
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # so that other output does not mix with the answer
    order = json.load(sys.stdin)
    try:
        import submitit
        from submitit.core.utils import FailedJobError
    except ModuleNotFoundError as error:
        print(missing(str(error.name)), file=sys.stderr)
        return exits.REFUSED
    executor = submitit.AutoExecutor(order["folder"], cluster="slurm", **order["constructor"])
    executor.update_parameters(**limited(order["parameters"]))
    tasks = [SubmititTask(**each) for each in order["tasks"]]
    try:
        jobs = [] if order["dry_run"] else executor.submit_array(tasks)
        told: dict[str, Any] = {"job_ids": [job.job_id for job in jobs]}
    except FailedJobError as error:
        jobs, told = [], {"refused": str(error)}
    if order["dry_run"]:
        told = {"text": script(executor)}
    with answer:
        answer.write(json.dumps(told) + "\n")
    return 0


def missing(module: str) -> str:
    """Return the error message for the case that submitit, or a module that it needs, is not installed."""
    return f"muster: --on submitit: {sys.executable} has no {module}; run ./setup.sh, or pip install submitit"


def script(executor: "submitit.AutoExecutor") -> str:
    """Return the batch script that submitit would write."""
    inner: Any = executor._executor
    return str(inner._make_submission_file_text(inner._submitit_command_str, ""))


def limited(parameters: dict[str, Any]) -> dict[str, Any]:
    """Fill in a missing time limit with the partition's default instead of submitit's five minutes."""
    if "slurm_time" in parameters:
        return parameters
    argv = ["sinfo", "--noheader", f"--format={LIMITS}"]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=QUERY_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return parameters  # because sbatch will report the problem
    minutes = default_minutes(done.stdout, parameters.get("slurm_partition"))
    return {**parameters, "slurm_time": minutes}


def default_minutes(text: str, partition: str | None) -> int:
    """Read a partition's default time limit from sinfo's lines, in minutes; a year if there is no limit."""
    wanted = partition.split(",") if partition else []
    for line in text.splitlines():
        name, default, limit = (each.strip() for each in [*line.split("|"), "", ""][:3])
        if name.rstrip("*") in wanted or (not wanted and name.endswith("*")):
            return minutes_of(default) or minutes_of(limit) or YEAR_MINUTES
    return YEAR_MINUTES


def minutes_of(text: str) -> int:
    """Parse sinfo's time limit (1-00:00:00, 1:00:00, 30:00) into minutes, rounded up; 0 for infinite and n/a."""
    days, dash, clock = text.rpartition("-")
    parts = clock.split(":")
    if not all(part.isdecimal() for part in parts) or (dash and not days.isdecimal()):
        return 0
    seconds = 0
    for part in parts:
        seconds = 60 * seconds + int(part)
    return math.ceil((86_400 * int(days or 0) + seconds) / 60)


if __name__ == "__main__":
    sys.exit(main())
