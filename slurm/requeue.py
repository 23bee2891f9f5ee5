"""Have Slurm queue a job again, from inside the job: scontrol, and whether it may be asked at all."""

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

CALL_S: Final = 20.0
RUNNING: Final = "RUNNING"


@dataclass(frozen=True)
class Answer:
    """Whether Slurm did what it was asked, and what it said if it did not."""

    done: bool
    said: str = ""


def state_of(job: str, environ: Mapping[str, str]) -> str:
    """Return Slurm's word for the state of a job, or what squeue says where it does not tell."""
    seen = call(["squeue", "--noheader", f"--jobs={job}", "--format=%T"], environ)
    return seen.stdout.strip() or seen.stderr.strip() or "gone"


def queue_again(job: str, environ: Mapping[str, str]) -> Answer:
    """Queue a job again, which ends it here: Slurm signals all of it as soon as it has agreed."""
    done = call(["scontrol", "requeue", job], environ)
    return Answer(done.returncode == 0, (done.stderr or done.stdout).strip())


def call(argv: Sequence[str], environ: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Call one of Slurm's commands; one that is not there, or does not answer, has failed."""
    try:
        return subprocess.run(argv, env=dict(environ), capture_output=True, text=True, timeout=CALL_S, check=False)
    except FileNotFoundError:
        return subprocess.CompletedProcess(argv, 127, "", f"{argv[0]} is not here")
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(argv, 1, "", str(error))
