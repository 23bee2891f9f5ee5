"""A job whose supervisor is gone with its node: with --no-kill Slurm would keep the others running to its limit."""

import subprocess
from collections.abc import Mapping
from typing import Final

CALL_S: Final = 20.0


def end_orphan(environ: Mapping[str, str], *, requeue: bool) -> str:
    """Queue the job around this process again, or cancel it, if Slurm holds it for running; say what was done.

    A job that somebody cancels at the same moment is left alone: scontrol would queue it again.
    """
    job = environ.get("SLURM_JOB_ID", "")
    seen = _call(["squeue", "--noheader", "--jobs", job, "--format=%T"], environ)
    if seen.returncode != 0 or seen.stdout.strip() != "RUNNING":
        return f"Slurm job {job}: {seen.stdout.strip() or seen.stderr.strip() or 'is gone'}"
    argv = ["scontrol", "requeue", job] if requeue else ["scancel", job]
    done = _call(argv, environ)
    return f"{' '.join(argv)}: {'done' if done.returncode == 0 else done.stderr.strip()}"


def _call(argv: list[str], environ: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(argv, env=dict(environ), capture_output=True, text=True, timeout=CALL_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(argv, 1, "", str(error))
