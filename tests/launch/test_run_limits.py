"""`muster run` where time, a folder or a disk runs out."""

import json
import os
import re
import signal
import stat
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from muster.jobs.basics.files import read_lines
from muster.jobs.machine.linux import descendants
from muster.jobs.node.leftovers import state_of
from muster.launch.cli import main
from muster.launch.common.processes import command_line, of_run
from support.live import SLEEP, TRAINING, LiveRun, argv, two_by_two, wait_until
from support.terminals import through_pipes
from support.users import needs_root

pytestmark = [pytest.mark.command, pytest.mark.ranks, pytest.mark.slow, pytest.mark.usefixtures("forked_supervisors")]


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
    live = LiveRun(tmp_path, two_by_two(code, rendezvous_timeout_s=4))
    assert live.end() == 124
    message = live.verdict()["message"]
    limit = "4 s after the first rank (rendezvous_timeout_s)"
    assert re.match(r"rank 2 on node 1 \(\S+\) did not reach the rendezvous within ", message), message
    assert message.endswith(limit)
    assert "or raise rendezvous_timeout_s" in live.err


def test_a_program_may_prepare_for_longer_than_the_start_time_out_before_it_meets(tmp_path: Path) -> None:
    code = f"""
import os, socket, time
if os.environ["RANK"] == "0":
    time.sleep(8)  # longer than start_timeout_s and the time added to it
connection = socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
open({str(tmp_path)!r} + "/met-" + os.environ["RANK"], "w").close()
while not all(os.path.exists(f"{tmp_path}/met-{{rank}}") for rank in range(4)):
    time.sleep(0.1)
"""
    live = LiveRun(tmp_path, two_by_two(code, start_timeout_s=1))
    assert live.end() == 0, live.err


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
    code, _, err = through_pipes("run", str(job), "--runs", str(blocked))
    assert (code, len(err.splitlines())) == (73, 1)
    assert err.startswith("muster: ")
    assert "--runs DIR" in err


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


FLOOD = """
import os, time
line = b"x" * ((1 << 20) - 1) + b"\\n"
os.write(1, b"the first line\\n")
for _ in range(320):
    os.write(1, line)
os.write(1, b"the last line\\n")
"""


def test_a_rank_that_prints_without_end_does_not_fill_the_disk(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    live = LiveRun(
        tmp_path, "ranks_per_node: 2\n" + argv(f"import os\nif os.environ['RANK'] == '1':\n    exec({FLOOD!r})")
    )
    assert live.end() == 0, live.err
    status = live.run.attempt(0).out(1).stat()
    assert status.st_size > 320 << 20
    assert status.st_blocks * 512 <= 272 << 20
    assert main(["logs", live.run.run_id, "--grep", "^the |left out", "--runs", str(live.root)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition("] ")[2][:9] for line in lines] == ["the first", "[muster: ", "the last "]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of its own of 2 MB."""
    point = tmp_path / "disk"
    point.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(point)], check=True)
    yield point
    subprocess.run(["umount", "--lazy", str(point)], check=True)


def take_all_space(disk: Path) -> Path:
    """Write a file until the disk is full. The run writes to it meanwhile, so its free space cannot be reserved."""
    path = disk / "somebody-elses-file"
    with suppress(OSError), path.open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    return path


@needs_root
@pytest.mark.parametrize(
    "restart",
    [pytest.param("", id="once"), pytest.param("restart: {max: 2}\n", id="restarted", marks=pytest.mark.soak)],
)
def test_a_disk_that_is_full_to_the_last_byte_takes_the_verdict(
    disk: Path, restart: str, capsys: pytest.CaptureFixture[str]
) -> None:
    live = LiveRun(disk, TRAINING + restart)
    wait_until(lambda: live.run.metrics.is_file() and len(list(read_lines(live.run.metrics))) >= 2, "two steps")
    take_all_space(disk)
    assert live.end() == 74
    last = list(read_lines(live.run.attempts))[-1]
    assert (last["code"], last["class"]) == (74, "storage")
    assert live.events("ended")[0]["class"] == "storage"
    assert main(["why", live.run.run_id, "--runs", str(live.root)]) == 0
    told = capsys.readouterr().out
    assert "failed: storage, exit code 74" in told
    assert "supervisor" not in told
    assert not live.run.reserve.exists()


@needs_root
@pytest.mark.parametrize("in_place", ["auto", "false"])
def test_an_attempt_that_would_begin_on_a_full_disk_waits_for_space(disk: Path, in_place: str) -> None:
    short = TRAINING.replace("epochs: 100", "steps: 30").replace("mode: bucketed", "mode: flat")
    live = LiveRun(disk, f"{short}checkpoint: {{every_steps: 1000}}\nrestart: {{max: 2, in_place: {in_place}}}\n")
    wait_until(lambda: live.run.metrics.is_file() and len(list(read_lines(live.run.metrics))) >= 5, "five steps")
    pid = live.pid_of(1)
    other = take_all_space(disk)
    os.kill(pid, signal.SIGKILL)
    wait_until(live.run.nonce("space").exists, "the supervisor to find the disk full")
    other.unlink()
    assert live.end() == 0, live.err
    assert "the next attempt waits up to 60 s for it" in live.err
    sizes = [row["world_size"] for row in read_lines(live.run.attempts)]
    assert sizes[:2] == ([2, 1] if in_place == "auto" else [2, 2])
    assert not live.run.nonce("space").exists()
