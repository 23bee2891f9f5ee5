"""The Slurm of a real box: its commands on the host, jobs on all nodes, and the failures that can be rehearsed."""

import os
import subprocess
from pathlib import Path

import pytest

from muster.cloudlab.box.control import Box
from muster.cloudlab.box.processes import wait_until
from support.boxes import ssh

pytestmark = [pytest.mark.command, pytest.mark.cluster, pytest.mark.timeout(120)]

START_S = 20.0


def slurm(box: Box, *argv: str, timeout_s: float = 30.0) -> str:
    """Run one of Slurm's commands on the host, with SLURM_CONF alone, and return what it printed."""
    environment = {**os.environ, "SLURM_CONF": str(box.paths.slurm_conf)}
    out = subprocess.run(
        argv, capture_output=True, text=True, env=environment, timeout=timeout_s, stdin=subprocess.DEVNULL, check=False
    )
    assert out.returncode == 0, out.stderr
    return out.stdout


def submit(box: Box, folder: Path, script: str, *options: str) -> str:
    """Submit a shell script and return the job's number."""
    path = folder / "script.sh"
    path.write_text(f"#!/bin/sh\n{script}\n")
    output = f"--output={folder}/%j.out"
    return slurm(box, "sbatch", "--parsable", output, "--open-mode=append", *options, str(path)).strip()


def field(box: Box, job: str, name: str) -> str:
    """Return one field of what the controller knows about a job."""
    words = dict(word.partition("=")[::2] for word in slurm(box, "scontrol", "show", "job", job).split())
    return words[name]


def reaches(box: Box, job: str, state: str, timeout_s: float = START_S) -> bool:
    """Wait until a job is in a state."""
    return wait_until(lambda: field(box, job, "JobState") == state, timeout_s, poll_s=0.1)


def test_all_nodes_are_idle_as_soon_as_up_returns(box: Box) -> None:
    lines = slurm(box, "sinfo", "--noheader", "--Node", "--partition=batch", "--format=%N %T %c").splitlines()
    assert lines == [f"node{k} idle 4" for k in range(4)]
    assert {node.node: node.slurm for node in box.status().nodes}["head"] == "controller"


def test_srun_works_on_the_host_on_the_head_and_on_a_node(box: Box, tmp_path: Path) -> None:
    wanted = [f"{rank} node{rank // 2}" for rank in range(8)]
    script = tmp_path / "who.sh"
    script.write_text("#!/bin/sh\necho $SLURM_PROCID $(hostname)\n")
    script.chmod(0o755)
    assert sorted(slurm(box, "srun", "-N4", "--ntasks-per-node=2", str(script)).splitlines()) == wanted
    for node in ("head", "node2"):
        assert sorted(ssh(box, node, f"srun -N4 --ntasks-per-node=2 {script}").stdout.splitlines()) == wanted


def test_memory_that_forks_share_counts_once(box: Box, tmp_path: Path) -> None:
    forks = (
        "x = bytearray(60 << 20); forks = [os.fork() for _ in range(3)]; time.sleep(4)"  # 8 processes: 480 MB of RSS
    )
    job = submit(box, tmp_path, f"exec python3 -c 'import os, time; {forks}'", "--mem=200")
    assert reaches(box, job, "COMPLETED")


@pytest.mark.soak
def test_a_job_of_the_low_partition_makes_room_and_is_queued_again(box: Box, tmp_path: Path) -> None:
    low = submit(box, tmp_path, "echo start; sleep 60", "--partition=preempt", "--nodes=4", "--exclusive")
    assert reaches(box, low, "RUNNING")
    high = submit(box, tmp_path, "sleep 0.1", "--nodes=4", "--exclusive")
    assert reaches(box, high, "COMPLETED")
    assert reaches(box, low, "RUNNING", 60.0)
    assert field(box, low, "Restarts") == "1"
    slurm(box, "scancel", low)
    assert reaches(box, low, "CANCELLED")


@pytest.mark.soak
def test_a_job_that_lost_a_node_is_queued_again_and_the_node_comes_back(breakable: Box, tmp_path: Path) -> None:
    job = submit(breakable, tmp_path, "sleep 60", "--nodes=2", "--nodelist=node2,node3")
    assert reaches(breakable, job, "RUNNING")
    breakable.fail("node3", "power")
    assert wait_until(lambda: field(breakable, job, "JobState") != "RUNNING", 60.0, poll_s=0.2)
    breakable.heal("node3")
    states = {node.node: node.slurm for node in breakable.status().nodes}
    assert states["node3"] in ("idle", "allocated", "mixed", "completing")
    slurm(breakable, "scancel", job)
    assert reaches(breakable, job, "CANCELLED")


def test_the_controller_remembers_its_jobs_when_the_head_starts_again(breakable: Box, tmp_path: Path) -> None:
    job = submit(breakable, tmp_path, "sleep 60", "--nodes=1")
    assert reaches(breakable, job, "RUNNING")
    memory = breakable.paths.slurm / "job_state"
    started = memory.stat().st_mtime_ns if memory.exists() else 0
    assert wait_until(lambda: memory.exists() and memory.stat().st_mtime_ns > started, 20.0)  # written every 5 s
    breakable.fail("head", "kill")
    assert {node.slurm for node in breakable.status().nodes} == {None}
    breakable.heal("head")
    assert field(breakable, job, "JobState") == "RUNNING"
    slurm(breakable, "scancel", job)
    assert reaches(breakable, job, "CANCELLED")
