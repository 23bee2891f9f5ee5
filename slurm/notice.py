"""Slurm's notice to a running job: why and when it is about to end, derived from scontrol's record. Pure.

preempted    PreemptTime is set, and EndTime is the end of the grace time
time limit   EndTime is near
"""

from dataclasses import dataclass
from typing import Final

from muster.jobs.spec.slurm import EARLY_S
from muster.slurm.states import JobState

PREEMPTED: Final = "preempted"
TIME_LIMIT: Final = "time limit"


@dataclass(frozen=True)
class Notice:
    """The reason why a job is about to end, and the time of its end (unix seconds)."""

    reason: str
    deadline: float

    @property
    def message(self) -> str:
        """The reason as a sentence."""
        return "Slurm gives the nodes to another job" if self.reason == PREEMPTED else "the time limit is near"


def notice_of(job: JobState | None, now: float, signal_s: int, *, limit: bool) -> Notice | None:
    """Return the notice of a job that Slurm is about to end; None if Slurm is not the sender of a signal.

    `limit`: the job received the signal that Slurm sends `signal_s` seconds before the time limit.
    """
    runs = job is not None and job.phase == "running" and job.state != "COMPLETING"
    end = job.end_time if job is not None and runs else None
    if job is not None and job.preempted and end is not None:
        return Notice(PREEMPTED, end)
    if end is not None and end - now <= signal_s + EARLY_S:
        return Notice(TIME_LIMIT, end)
    return Notice(TIME_LIMIT, now + signal_s) if limit else None
