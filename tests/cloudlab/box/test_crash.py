"""`muster box down` after a `muster box up` that was killed at any moment leaves nothing."""

import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from muster.cloudlab.box.control import box_up
from muster.cloudlab.box.machine import LINKS
from muster.cloudlab.box.make import make
from muster.cloudlab.box.paths import NETNS, BoxPaths
from muster.cloudlab.box.processes import wait_until
from muster.cloudlab.box.remove import take_down
from muster.cloudlab.box.spec import BoxSpec, netns_pattern
from muster.jobs.basics.errors import RefusedError
from support.boxes import leftovers, muster, number_of

pytestmark = [pytest.mark.command, pytest.mark.cluster]


def count(folder: Path, pattern: str) -> int:
    """Count the files of a pattern; a folder that is not there has none."""
    return len(list(folder.glob(pattern)))


def links(name: str) -> int:
    """Count the links of a box."""
    number = number_of(name)
    return count(LINKS, f"mb{number}*") if number else 0


def namespaces(name: str) -> int:
    """Count the namespaces of a box."""
    return sum(netns_pattern(name).fullmatch(path.name) is not None for path in NETNS.glob("*"))


# moments of `muster box up --nodes 4 --slurm`, by what can be seen of it
MOMENTS: dict[str, Callable[[str], bool]] = {
    "started": lambda name: True,
    "folder": lambda name: BoxPaths.of(name).path.exists(),
    "state": lambda name: BoxPaths.of(name).state.exists(),
    "keys": lambda name: count(BoxPaths.of(name).nodes, "*/host_key") > 0,
    "first namespace": lambda name: namespaces(name) > 0,
    "some links": lambda name: links(name) > 2,
    "all links": lambda name: links(name) == 6,
    "first process": lambda name: count(BoxPaths.of(name).nodes, "*/init.json") > 0,
    "all processes": lambda name: count(BoxPaths.of(name).nodes, "*/init.json") == 5,
    "first sshd": lambda name: count(BoxPaths.of(name).nodes, "*/sshd.log") > 0,
    "controller": lambda name: count(BoxPaths.of(name).nodes, "head/slurmctld.log") > 0,
    "all slurmds": lambda name: count(BoxPaths.of(name).nodes, "*/slurmd.log") == 4,
}


def kill_up(name: str, moment: Callable[[str], bool]) -> int | None:
    """Start `muster box up`, kill it at a moment, and return the box's number if it had chosen one."""
    with subprocess.Popen(
        muster("box", "up", "--name", name, "--slurm"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        wait_until(lambda: moment(name) or process.poll() is not None, 20.0, poll_s=0.0002)
        process.send_signal(signal.SIGKILL)
    return number_of(name)


@pytest.mark.parametrize("moment", MOMENTS)
def test_down_after_a_kill_half_way_up_leaves_nothing(moment: str, new_name: Callable[[], str]) -> None:
    name = new_name()
    number = kill_up(name, MOMENTS[moment])
    take_down(name)
    assert leftovers(name, number) == []


def test_down_after_kills_at_random_moments_leaves_nothing(new_name: Callable[[], str]) -> None:
    moments = random.Random(1)
    left = {}
    for _ in range(15):
        name, wait_s = new_name(), moments.uniform(0.05, 0.6)
        until = time.monotonic() + wait_s
        number = kill_up(name, lambda _, until=until: time.monotonic() > until)  # type: ignore[misc]
        take_down(name)
        if found := leftovers(name, number):
            left[wait_s] = found
    assert left == {}


def test_the_name_of_a_half_made_box_can_be_used_after_down_and_not_before(new_name: Callable[[], str]) -> None:
    name = new_name()
    kill_up(name, MOMENTS["all links"])
    with pytest.raises(RefusedError, match=f"box {name} is incomplete.*muster box down --name {name}"):
        make(BoxSpec(name=name))
    take_down(name)
    with box_up(BoxSpec(name=name, nodes=1)) as box:
        assert [node.state for node in box.status().nodes] == ["up"]


def test_an_interrupted_up_cleans_up_by_itself(new_name: Callable[[], str]) -> None:
    name = new_name()
    with subprocess.Popen(
        muster("box", "up", "--name", name, "--slurm"), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as process:
        assert wait_until(lambda: links(name) > 2, 20.0, poll_s=0.0002)
        number = number_of(name)
        process.send_signal(signal.SIGINT)
        assert process.wait(30.0) == 130
    assert leftovers(name, number) == []


def test_down_works_when_the_files_are_gone(new_name: Callable[[], str]) -> None:
    """Somebody removed the folder by hand: namespaces and bridge still tell whose they are."""
    name = new_name()
    make(BoxSpec(name=name, nodes=2))
    number = number_of(name)
    BoxPaths.of(name).state.unlink()
    assert take_down(name)
    assert leftovers(name, number) == []


def test_down_of_nothing_is_harmless(new_name: Callable[[], str]) -> None:
    assert not take_down(new_name())
