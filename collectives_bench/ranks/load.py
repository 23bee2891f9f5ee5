"""How much other programs use the CPUs of the hosts during a block (`jobs/machine/load.py`).

The kernel counts in ticks, so the load of a short block is measured over the last WINDOW_S seconds before its end,
which may include earlier blocks.
"""

from collections.abc import Sequence
from typing import Final

from muster.collectives_bench.records import ForeignLoad
from muster.jobs.machine.load import Reading, shares

WINDOW_S: Final = 0.3


class LoadHistory:
    """The readings of all ranks over time. `machines` has the machine id of each rank, and `hosts` its host name."""

    def __init__(self, machines: Sequence[str], hosts: Sequence[str]) -> None:
        self.machines = machines
        self.hosts = hosts
        self._past: list[tuple[float, list[Reading]]] = []  # (time in seconds, one reading per rank), oldest first

    def add(self, now: float, readings: Sequence[Reading]) -> ForeignLoad | None:
        """Add the readings of all ranks at time `now`, in seconds. Return the busiest host's load in the last WINDOW_S.

        Return None for the first reading, with which counting begins.
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

    def _of(self, machine: str, before: Sequence[Reading], after: Sequence[Reading]) -> ForeignLoad:
        ranks = [rank for rank, each in enumerate(self.machines) if each == machine]
        own_s = sum(after[rank].own_s - before[rank].own_s for rank in ranks)
        first = ranks[0]
        foreign, steal = shares(before[first], after[first], own_s)
        return ForeignLoad(foreign=foreign, steal=steal, host=self.hosts[first])
