"""The allocations of a run so far, and how many of the latest ones made no new checkpoint. Pure.

    events.jsonl   allocation … resuming step 20 … saved step 35 …     it brought the run from 20 to 35
                   allocation … resuming step 35 …                     nothing new: the first in a row
                   allocation … resuming step 35 … saved step 35       the second: it saved its first step again

Slurm does not limit requeues after a failed node or a preemption. Without a limit in Muster, a run that never reaches
its next checkpoint would be queued forever.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

EVENT: Final = "allocation"
MAX_FRUITLESS: Final = 3


@dataclass
class AllocationStart:
    """One start of the Slurm job: Slurm's count of earlier starts, the first step, and the last checkpoint's step."""

    restarts: int
    began: int | None = None
    saved: int = 0


def allocations(rows: Iterable[Mapping[str, Any]], job: str) -> list[AllocationStart]:
    """Return the starts of a Slurm job, oldest first, from the events of its run."""
    found: list[AllocationStart] = []
    for row in rows:
        match row.get("event"):
            case "allocation":
                # This row is of another job: a user has resumed the run, so the count starts again.
                found = found if row.get("job") == job else []
                if row.get("job") == job:
                    found.append(AllocationStart(row.get("restarts", 0)))
            case "resuming" if found and found[-1].began is None:
                found[-1].began = row.get("step", 0)
            case "saved" if found:
                found[-1].saved = max(found[-1].saved, row.get("step", 0))
    return found


def fruitless(found: list[AllocationStart], restarts: int | None = None) -> int:
    """Count the allocations since the last one that made a new checkpoint.

    `restarts`: Slurm's count of earlier starts, if the current start is not recorded yet. Starts that left no row
    count as fruitless: they ended before Muster began.
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


def disagreement(found: list[AllocationStart], restarts: int, job: str) -> str:
    """Describe a difference between Slurm's count of starts and ours; return "" if they agree."""
    if restarts == len(found):
        return ""
    ours = f"but the run folder has a record of {len(found)}"
    if restarts > len(found):
        return (
            f"Slurm has started job {job} {restarts} times before (SLURM_RESTART_COUNT), {ours}: the other "
            f"starts ended before Muster began; see slurm-{job}.out"
        )
    return f"Slurm has started job {job} {restarts} times before (SLURM_RESTART_COUNT), {ours}: its count was reset"
