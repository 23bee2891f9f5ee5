"""`muster run` where time, a folder or a disk runs out."""

import json
import os
import re
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from muster.jobs.basics.files import read_lines
from muster.jobs.machine.linux import descendants
from muster.jobs.node.leftovers import state_of
from muster.launch.common.processes import command_line, of_run
from support.live import SLEEP, TRAINING, LiveRun, argv, two_by_two, wait_until

pytestmark = pytest.mark.ranks


def fill(path: Path) -> None:
    """Let a file be one on a full disk, in a single step: its writer may be at work."""
    full = path.with_name("full")
    if os.geteuid() != 0:
        pytest.skip("needs root, to make a device node: logs follow no links")
    os.mknod(full, stat.S_IFCHR | 0o600, Path("/dev/full").stat().st_rdev)
    full.replace(path)


def test_a_rank_that_never_reaches_the_rendezvous_is_named(tmp_path: Path) -> None:
    # To have reached the store is to be connected with it: node/test_census.py shows that of torch's own connections.
    code = """
import os, socket, time
if os.environ["RANK"] != "2":
    connection = socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
time.sleep(1000)
"""
    live = LiveRun(tmp_path, two_by_two(code, start_timeout_s=4))
    assert live.end() == 124
    message = live.verdict()["message"]
    assert re.match(r"rank 2 on node 1 \(\S+\) did not reach the rendezvous within 4 s", message), message


def test_training_ranks_that_never_come_are_named(tmp_path: Path) -> None:
    live = LiveRun(tmp_path, TRAINING + "start_timeout_s: 3\n")
    live.wait_for("submitted")
    stopped: set[int] = set()  # the warm process, which imports torch, and what it has forked if that took no time

    def stands_still() -> bool:
        found = {pid for pid in descendants(live.process.pid) if "muster.jobs.node.warm" in command_line(pid)}
        fresh = found - stopped
        for pid in fresh:
            os.kill(pid, signal.SIGSTOP)
        stopped.update(fresh)
        return bool(found) and not fresh and {state_of(pid) for pid in found} == {"T"}

    wait_until(stands_still, "the warm process to stand still")
    assert live.end() == 124
    assert "rank 0 on node 0, rank 1 on node 1" in live.verdict()["message"]
    assert not live.left()


def test_a_program_that_meets_nobody_has_no_start_time_out(tmp_path: Path) -> None:
    live = LiveRun(tmp_path, two_by_two("import time; time.sleep(3)", start_timeout_s=2))
    assert live.end() == 0, live.err


def test_an_unwritable_run_folder_is_refused_before_anything_starts(tmp_path: Path) -> None:
    blocked = tmp_path / "runs"
    blocked.write_text("a file where the folder should be")
    job = tmp_path / "job.yaml"
    job.write_text(argv("pass"))
    done = subprocess.run(
        [sys.executable, "-m", "muster", "run", str(job), "--runs", str(blocked)], capture_output=True, text=True
    )
    assert done.returncode == 73
    assert done.stderr.startswith("muster: ")
    assert "--runs DIR" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_full_disk_under_the_supervisor_is_said_and_changes_no_verdict(tmp_path: Path) -> None:
    live = LiveRun(tmp_path, two_by_two(SLEEP))
    live.wait_for("started", 2)
    run_id, events = live.run.run_id, live.run.events
    fill(events)
    os.kill(json.loads(live.run.attempt(0).node(1).read_text())["ranks"][0]["pid"], signal.SIGKILL)
    assert live.end() == 128 + signal.SIGKILL
    assert "No space left on device; free some space" in live.err
    assert "was killed by SIGKILL" in live.err
    assert not of_run(run_id)


def test_a_full_disk_under_rank_0_ends_the_run_with_74_and_keeps_what_was_written(tmp_path: Path) -> None:
    live = LiveRun(tmp_path, TRAINING)
    wait_until(lambda: live.run.metrics.is_file() and len(list(read_lines(live.run.metrics))) >= 2, "two steps")
    kept = tmp_path / "kept.jsonl"
    kept.hardlink_to(live.run.metrics)
    fill(live.run.metrics)
    assert live.end() == 74
    assert "No space left on device" in live.err
    assert len(list(read_lines(kept))) >= 2
