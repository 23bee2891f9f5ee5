"""How busy this host is: the share of its processor time that is not ours, and what the hypervisor steals.

    foreign = (busy - what our processes used) / (time x cores)        busy = user + nice + system of /proc/stat
    steal   = what the hypervisor gave to other guests, as a share of the same

/proc/stat counts in ticks of 10 ms.
"""

import os
import resource
from pathlib import Path
from typing import Final, NamedTuple

STAT: Final = Path("/proc/stat")
# of the line "cpu": user nice system idle iowait irq softirq steal; guest times are part of user's
BUSY: Final = (0, 1, 2)
STEAL: Final = 7
ALL: Final = range(8)


class Reading(NamedTuple):
    """What a process sees of its host since boot, in seconds of processor time, and its own part."""

    own_s: float
    busy_s: float
    steal_s: float
    all_s: float


def read() -> Reading:
    """Read the counters of this host and of this process: all its threads, and its children that have ended."""
    used = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    with STAT.open(encoding="ascii") as file:
        words = file.readline().split()[1:]
    ticks = [int(word) for word in words] + [0] * (len(ALL) - len(words))
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    return Reading(
        own_s=sum(each.ru_utime + each.ru_stime for each in used),
        busy_s=sum(ticks[field] for field in BUSY) * tick_s,
        steal_s=ticks[STEAL] * tick_s,
        all_s=sum(ticks[field] for field in ALL) * tick_s,
    )


def shares(before: Reading, after: Reading, own_s: float | None = None) -> tuple[float, float]:
    """Return the foreign and the stolen share between two readings; 0 of less than a tick.

    `own_s` is what our processes used meanwhile, if they are more than the one that read.
    """
    total_s = after.all_s - before.all_s
    if total_s <= 0:
        return 0.0, 0.0
    own_s = after.own_s - before.own_s if own_s is None else own_s
    foreign_s = max(0.0, after.busy_s - before.busy_s - own_s)
    return round(min(1.0, foreign_s / total_s), 4), round(min(1.0, (after.steal_s - before.steal_s) / total_s), 4)
