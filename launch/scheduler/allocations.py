"""The allocations that a run has had from its scheduler, and how many of the last ones brought it no further. Pure.

    events.jsonl   allocation … resuming step 20 … saved step 35 …     it brought the run from 20 to 35
                   allocation … resuming step 35 …                     nothing new: the first in a row
                   allocation … resuming step 35 … saved step 35       the second: what it began from, saved once more

Slurm itself bounds no requeue after a failed node or a preemption, so a run that never comes as far as its next
checkpoint would be queued for ever.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

EVENT: Final = "allocation"
MAX_FRUITLESS: Final = 3


@dataclass
class Allocation:
    """One start of the scheduler's job: its count of earlier ones, and from which step to which checkpoint it came."""

    restarts: int
    began: int | None = None
    saved: int = 0


def allocations(rows: Iterable[Mapping[str, Any]], job: str) -> list[Allocation]:
    """Read the starts of a scheduler's job from the events of its run, oldest first."""
    found: list[Allocation] = []
    for row in rows:
        match row.get("event"):
            case "allocation":
                # Of another job: somebody has resumed the run, and the count begins anew.
                found = found if row.get("job") == job else []
                if row.get("job") == job:
                    found.append(Allocation(row.get("restarts", 0)))
            case "resuming" if found and found[-1].began is None:
                found[-1].began = row.get("step", 0)
            case "saved" if found:
                found[-1].saved = max(found[-1].saved, row.get("step", 0))
    return found


def fruitless(found: list[Allocation], restarts: int | None = None) -> int:
    """Count the newest allocations in a row that made no new checkpoint.

    `restarts` is Slurm's count at a start that is not on record yet: starts that it counts and that left no row never
    came as far as Muster.
    """
    count = 0
    if restarts is not None:
        count = max(0, restarts - (found[-1].restarts + 1 if found else 0))
    following: int | None = None  # from which step the next one began
    for each in reversed(found):
        began = each.began or 0
        if each.saved > began or (following is not None and following > began):
            return count
        count += 1
        following = each.began if each.began is not None else following
    return count


def disagreement(found: list[Allocation], restarts: int, job: str) -> str:
    """Say that Slurm's count of starts is another than ours; empty when they agree."""
    if restarts == len(found):
        return ""
    ours = f"{len(found)} on record in the run folder"
    if restarts > len(found):
        return (
            f"Slurm has started job {job} {restarts} times before (SLURM_RESTART_COUNT), with {ours}: the others ended "
            f"before Muster had begun; see slurm-{job}.out"
        )
    return (
        f"Slurm has started job {job} {restarts} times before (SLURM_RESTART_COUNT), with {ours}: its count was reset"
    )
