"""The load of this host: the share of its CPUs used by other programs, and the share stolen by the hypervisor.

    other programs = (busy - used by our processes) / (time x cores)        busy = user + nice + system of /proc/stat
    stolen         = given to other guests by the hypervisor / (time x cores)

/proc/stat counts in ticks of 10 ms.
"""

import os
import resource
from pathlib import Path
from typing import Final, NamedTuple

STAT: Final = Path("/proc/stat")
# fields of the line "cpu": user nice system idle iowait irq softirq steal; guest times are included in user
BUSY: Final = (0, 1, 2)
INTERRUPTS: Final = (5, 6)  # such as the kernel's work for network packets
STEAL: Final = 7
ALL: Final = range(8)


class Reading(NamedTuple):
    """CPU time in seconds: of this process, and of the host since boot."""

    own_s: float
    busy_s: float
    steal_s: float
    all_s: float
    interrupts_s: float = 0.0


def read() -> Reading:
    """Read the counters of this host and of this process with all its threads and reaped children."""
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
        interrupts_s=sum(ticks[field] for field in INTERRUPTS) * tick_s,
    )


def shares(before: Reading, after: Reading, own_s: float | None = None) -> tuple[float, float]:
    """Return the share of other programs and the stolen share between two readings.

    Both are 0 if the readings are less than a tick apart. `own_s` is the CPU time that all our processes used between
    them; by default, this process and its children.
    """
    total_s = after.all_s - before.all_s
    if total_s <= 0:
        return 0.0, 0.0
    own_s = after.own_s - before.own_s if own_s is None else own_s
    foreign_s = max(0.0, after.busy_s - before.busy_s - own_s)
    return round(min(1.0, foreign_s / total_s), 4), round(min(1.0, (after.steal_s - before.steal_s) / total_s), 4)
