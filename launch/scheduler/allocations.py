"""The scheduler's allocations of a run so far, and how many of the last ones made no new checkpoint. Pure.

    events.jsonl   allocation … resuming step 20 … saved step 35 …     it brought the run from 20 to 35
                   allocation … resuming step 35 …                     nothing new: the first in a row
                   allocation … resuming step 35 … saved step 35       the second: it saved its first step again

Slurm does not limit requeues after a failed node or a preemption. Without a limit of ours, a run that never reaches its
next checkpoint would be queued forever.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

EVENT: Final = "allocation"
MAX_FRUITLESS: Final = 3


@dataclass
class Allocation:
    """One start of the scheduler's job: Slurm's count of earlier starts, the first step, and the last checkpoint."""

    restarts: int
    began: int | None = None
    saved: int = 0


def allocations(rows: Iterable[Mapping[str, Any]], job: str) -> list[Allocation]:
    """Read the starts of a scheduler's job from the events of its run, oldest first."""
    found: list[Allocation] = []
    for row in rows:
        match row.get("event"):
            case "allocation":
                # For another job, the run was resumed by a user, and the count starts anew.
                found = found if row.get("job") == job else []
                if row.get("job") == job:
                    found.append(Allocation(row.get("restarts", 0)))
            case "resuming" if found and found[-1].began is None:
                found[-1].began = row.get("step", 0)
            case "saved" if found:
                found[-1].saved = max(found[-1].saved, row.get("step", 0))
    return found


def fruitless(found: list[Allocation], restarts: int | None = None) -> int:
    """Count the most recent allocations in a row that made no new checkpoint.

    `restarts`: Slurm's count at a start that is not yet recorded. Starts that Slurm counts but that left no row ended
    before Muster began.
    """
    count = 0
    if restarts is not None:
        count = max(0, restarts - (found[-1].restarts + 1 if found else 0))
    following: int | None = None  # the first step of the next allocation
    for each in reversed(found):
        began = each.began or 0
        if each.saved > began or (following is not None and following > began):
            return count
        count += 1
        following = each.began if each.began is not None else following
    return count


def disagreement(found: list[Allocation], restarts: int, job: str) -> str:
    """Describe a difference between Slurm's count of starts and ours; return "" if they agree."""
    if restarts == len(found):
        return ""
    ours = f"{len(found)} on record in the run folder"
    if restarts > len(found):
        return (
            f"Slurm has started job {job} {restarts} times before (SLURM_RESTART_COUNT), with {ours}: the others "
            f"ended before Muster had begun; see slurm-{job}.out"
        )
    return (
        f"Slurm has started job {job} {restarts} times before (SLURM_RESTART_COUNT), with {ours}: its count was reset"
    )
