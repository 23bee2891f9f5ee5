"""Sweeping a tree of processes: real ones, and one that nobody can kill."""

import os
import subprocess
import sys

import pytest

from muster.jobs.node import leftovers

pytestmark = pytest.mark.ranks


def swept_by_a_process(code: str) -> list[str]:
    """Run code in a process that is the parent of its orphans; return what it printed."""
    head = "import os, signal, subprocess, sys, time\nfrom muster.jobs.machine import linux\n"
    head += "from muster.jobs.node import leftovers\nlinux.adopt_orphans()\n"
    done = subprocess.run([sys.executable, "-I", "-c", head + code], capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_nothing_below_is_nothing_to_sweep() -> None:
    assert swept_by_a_process("print(leftovers.sweep(os.getpid()))") == [
        "SweepResult(count=0, buried=frozenset(), left=())"
    ]


def test_a_whole_tree_goes_whatever_it_does() -> None:
    code = """
tree = "trap '' TERM; setsid sleep 1000 & (setsid sleep 1000 &) ; echo ready; sleep 1000"
with subprocess.Popen(["bash", "-c", tree], stdout=subprocess.PIPE) as shell:
    shell.stdout.readline()
    swept = leftovers.sweep(os.getpid())
    print(swept.count >= 3, shell.pid in swept.buried, swept.left, linux.descendants(os.getpid()))
"""
    assert swept_by_a_process(code) == ["True True () []"]


def test_a_tree_that_is_to_stay_stays() -> None:
    code = """
spared, swept = (subprocess.Popen(["sleep", "1000"]) for _ in range(2))
found = leftovers.sweep(os.getpid(), leave=[spared.pid])
print(found.count, found.buried == {swept.pid}, linux.descendants(os.getpid()) == [spared.pid])
spared.kill()
"""
    assert swept_by_a_process(code) == ["1 True True"]


def test_what_cannot_be_killed_is_told_when_the_time_is_over() -> None:
    code = """
stubborn, other = (subprocess.Popen(["sleep", "1000"]) for _ in range(2))
kill = lambda pid: None if pid == stubborn.pid else leftovers.kill(pid)
found = leftovers.sweep(os.getpid(), limit_s=1.0, kill=kill)
print(found.count, found.left == (stubborn.pid,), found.buried == {other.pid})
print([each["name"] for each in leftovers.described(found.left)])
stubborn.kill()
"""
    assert swept_by_a_process(code) == ["2 True True", "['sleep']"]


def test_a_process_of_somebody_else_is_left_not_stumbled_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int, number: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "kill", refuse)
    leftovers.kill(os.getpid())


def test_the_state_of_a_process_is_the_kernels_letter() -> None:
    assert leftovers.state_of(os.getpid()) == "R"
    assert leftovers.state_of(2**22 + 1) == leftovers.GONE  # beyond the largest pid there can be


def test_a_process_that_has_gone_meanwhile_is_described_all_the_same() -> None:
    assert leftovers.described([2**22 + 1]) == [{"pid": 2**22 + 1, "state": "X", "name": "?"}]
