"""What else a host does while it is measured: the share of its processor time that is not our ranks', and steal.

    foreign = (busy - what our ranks used) / (time x cores)        busy = user + nice + system of /proc/stat
    steal   = what the hypervisor gave to other guests, as a share of the same

/proc/stat counts in ticks of 10 ms, so a short block is judged by the last WINDOW_S before its end, blocks before it
included. All ranks tell their readings at the end of a block; one of them keeps the history.
"""

import os
import resource
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from muster.collectives_bench.records import Load

STAT: Final = Path("/proc/stat")
WINDOW_S: Final = 0.3
# of the line "cpu": user nice system idle iowait irq softirq steal; guest times are part of user's
BUSY: Final = (0, 1, 2)
STEAL: Final = 7
ALL: Final = range(8)


class Reading(NamedTuple):
    """What one rank sees of its host since boot, in seconds of processor time, and its own part."""

    own_s: float
    busy_s: float
    steal_s: float
    all_s: float


def read() -> Reading:
    """Read the counters of this host and of this process, all its threads."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    with STAT.open(encoding="ascii") as file:
        words = file.readline().split()[1:]
    ticks = [int(word) for word in words] + [0] * (len(ALL) - len(words))
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    return Reading(
        own_s=used.ru_utime + used.ru_stime,
        busy_s=sum(ticks[field] for field in BUSY) * tick_s,
        steal_s=ticks[STEAL] * tick_s,
        all_s=sum(ticks[field] for field in ALL) * tick_s,
    )


class History:
    """The readings of all ranks over time; `machines` names the one of each rank, `hosts` how to call it."""

    def __init__(self, machines: Sequence[str], hosts: Sequence[str]) -> None:
        self.machines = machines
        self.hosts = hosts
        self._past: list[tuple[float, list[Reading]]] = []  # (seconds, one of each rank), oldest first

    def add(self, now: float, readings: Sequence[Reading]) -> Load | None:
        """Take the readings of all ranks at a time (seconds); return the load of the busiest host since WINDOW_S ago.

        None at the first reading, which only begins the count.
        """
        self._past.append((now, list(readings)))
        while len(self._past) > 2 and now - self._past[1][0] >= WINDOW_S:
            del self._past[0]
        if len(self._past) < 2:
            return None
        before = self._past[0][1]
        return max(
            (self._of(machine, before, readings) for machine in dict.fromkeys(self.machines)),
            key=lambda load: load.foreign + load.steal,
        )

    def _of(self, machine: str, before: Sequence[Reading], after: Sequence[Reading]) -> Load:
        ranks = [rank for rank, each in enumerate(self.machines) if each == machine]
        own_s = sum(after[rank].own_s - before[rank].own_s for rank in ranks)
        first = ranks[0]
        total_s = after[first].all_s - before[first].all_s
        if total_s <= 0:  # less than a tick: nothing can be said
            return Load(foreign=0.0, steal=0.0, host=self.hosts[first])
        foreign_s = max(0.0, after[first].busy_s - before[first].busy_s - own_s)
        return Load(
            foreign=round(min(1.0, foreign_s / total_s), 4),
            steal=round(min(1.0, (after[first].steal_s - before[first].steal_s) / total_s), 4),
            host=self.hosts[first],
        )
