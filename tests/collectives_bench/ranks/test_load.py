"""The CPU use of other programs: from drawn readings, and from this machine while something else works on it."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from muster.collectives_bench.ranks.load import LoadHistory
from muster.jobs.machine import load
from muster.jobs.machine.load import Reading


def reading(own_s: float, busy_s: float, all_s: float, steal_s: float = 0.0) -> Reading:
    return Reading(own_s=own_s, busy_s=busy_s, steal_s=steal_s, all_s=all_s)


def test_foreign_is_what_is_busy_and_not_any_of_the_ranks_of_that_machine() -> None:
    history = LoadHistory(["m", "m"], ["h", "h"])
    assert history.add(0.0, [reading(1.0, 100.0, 400.0), reading(2.0, 100.0, 400.0)]) is None
    found = history.add(0.5, [reading(1.4, 100.9, 401.0), reading(2.3, 100.9, 401.0)])
    assert found is not None
    assert (found.foreign, found.steal, found.host) == (pytest.approx(0.2), 0.0, "h")


def test_the_worst_host_is_told() -> None:
    history = LoadHistory(["m", "n"], ["quiet", "busy"])
    history.add(0.0, [reading(0.0, 0.0, 0.0), reading(0.0, 0.0, 0.0)])
    found = history.add(1.0, [reading(0.5, 0.5, 2.0), reading(0.5, 1.5, 2.0, 0.2)])
    assert found is not None
    assert (found.host, found.foreign, found.steal) == ("busy", 0.5, pytest.approx(0.1))


def test_a_short_block_is_judged_by_the_time_before_it_too() -> None:
    """Ticks are 10 ms: of a block of 20 ms one tick of somebody else's would look like half the machine."""
    history = LoadHistory(["m"], ["h"])
    for step in range(50):
        history.add(step * 0.02, [reading(step * 0.02, step * 0.02, step * 0.04)])
    last = history.add(1.0, [reading(1.0, 1.01, 2.0)])
    assert last is not None
    assert last.foreign == pytest.approx(0.01 / 0.6, rel=0.1)


def cpu_s(pid: int) -> float:
    """The CPU time of a process (proc(5), fields 14 and 15 of stat)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_another_process_on_this_machine_is_foreign_and_one_s_own_work_is_not() -> None:
    history = LoadHistory(["m"], ["h"])
    history.add(0.0, [load.read()])
    began, own_began = time.monotonic(), time.process_time()
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        # Both have worked, however busy the machine is with something else.
        while (own_s := time.process_time() - own_began) < 0.4 or (other_s := cpu_s(other.pid)) < 0.4:
            pass
        found = history.add(0.6, [load.read()])
        machine_s = (time.monotonic() - began) * (os.cpu_count() or 1)
    finally:
        other.kill()
        other.wait()
    assert found is not None
    assert found.foreign >= 0.8 * other_s / machine_s
    assert found.foreign <= 1 - 0.8 * own_s / machine_s
