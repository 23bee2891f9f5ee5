"""`muster run`, as a user starts it: real agents, a real warm process, real ranks."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jobs.files import read_lines
from jobs.linux import descendants
from jobs.rundir import RunDir, list_runs, make_run, run_path
from launch.processes import command_line, of_run, start_ticks
from support.live import LiveRun, argv, wait_until

pytestmark = pytest.mark.ranks

STUBBORN = (Path(__file__).parents[2] / "benchmarks" / "stubborn.py").read_text()
SLEEP = "import time; print('ready'); time.sleep(1000)"
TRAINING = """
nodes: 2
grace_s: 1
train: {model: vgg11, data: digits, mode: ddp, batch_size: 32, epochs: 100, log_every: 1, loader_workers: 2}
"""


def two_by_two(code: str, **keys: object) -> str:
    more = "".join(f"{key}: {value}\n" for key, value in keys.items())
    return f"nodes: 2\nranks_per_node: 2\ngrace_s: 1\n{more}{argv(code)}"


def test_every_rank_gets_its_variables_and_its_own_log(tmp_path: Path) -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "MASTER_ADDR")
    code = f"import os; print(*[os.environ[name] for name in {names}], os.environ['MASTER_PORT'])"
    live = LiveRun(tmp_path, two_by_two(code))
    assert live.end() == 0, live.err
    port = live.events("attempt")[0]["master_port"]
    logs = [live.run.attempt(0).out(rank).read_text().split() for rank in range(4)]
    assert logs == [f"{rank} 4 {rank % 2} 2 {rank // 2} {rank // 2} 127.0.0.1 {port}".split() for rank in range(4)]


def test_rank_0_is_shown_on_standard_output_and_the_rest_on_standard_error(tmp_path: Path) -> None:
    live = LiveRun(tmp_path, two_by_two("import os; print('line of', os.environ['RANK'])"))
    assert live.end() == 0
    assert live.out == "line of 0\n"
    assert "done in" in live.err
    assert "line of" not in live.err


def test_the_first_failing_ranks_own_code_is_the_exit_code(tmp_path: Path) -> None:
    # Rank 2 fails when the others are there, not before one of them could be started.
    code = f"""
import os, time
rank, folder = os.environ['RANK'], {str(tmp_path)!r}
print('I am', rank)
open(f'{{folder}}/here-{{rank}}', 'w').close()
while rank != '2' or not all(os.path.exists(f'{{folder}}/here-{{each}}') for each in range(4)):
    time.sleep(0.02)
exit(7)
"""
    live = LiveRun(tmp_path, two_by_two(code))
    assert live.end() == 7
    verdict = live.verdict()
    assert (verdict["class"], verdict["first"]["rank"], verdict["first"]["node"]) == ("failed", 2, 1)
    assert verdict["first"]["last_lines"] == ["I am 2"]
    assert sorted(victim["rank"] for victim in verdict["victims"]) == [0, 1, 3]
    assert {victim["cause"] for victim in verdict["victims"]} == {"stopped"}
    assert "rank 2 on node 1" in live.err


def test_a_killed_rank_is_named_with_its_signal(tmp_path: Path) -> None:
    live = LiveRun(tmp_path, two_by_two(SLEEP))
    os.kill(live.pid_of(3), signal.SIGKILL)
    assert live.end() == 128 + signal.SIGKILL
    first = live.verdict()["first"]
    assert (first["rank"], first["signal"], first["code"]) == (3, "SIGKILL", None)


def test_a_dead_rank_is_the_cause_and_those_that_lost_it_are_victims(tmp_path: Path) -> None:
    live = LiveRun(tmp_path, TRAINING)
    live.wait_for("joined")
    os.kill(live.pid_of(1), signal.SIGKILL)
    assert live.end() == 128 + signal.SIGKILL
    verdict = live.verdict()
    assert verdict["first"]["rank"] == 1
    assert [victim["rank"] for victim in verdict["victims"]] == [0]
    assert not live.left()


def test_a_rank_that_prints_megabytes_keeps_its_own_code(tmp_path: Path) -> None:
    code = "import sys; sys.stdout.write('yes\\n' * 1_000_000); sys.stderr.write('x' * 4_000_000); sys.exit(9)"
    live = LiveRun(tmp_path, argv(code))
    assert live.end() == 9
    assert live.out.count("yes\n") == 1_000_000
    assert all(len(line) < 2_000 for line in live.verdict()["first"]["last_lines"])


def test_ranks_that_fail_at_the_same_moment_are_one_failure(tmp_path: Path) -> None:
    """Once a stop order buried ranks whose reports the selector still held: the keeper fell over a closed pipe."""
    runs = []
    for number in range(4):
        folder = tmp_path / str(number)
        folder.mkdir()
        runs.append(LiveRun(folder, "ranks_per_node: 8\n" + argv("import sys; sys.exit(64)")))
    for live in runs:
        assert live.end() == 64, live.err
        assert "Traceback" not in live.err
        assert live.verdict()["class"] == "failed"


def test_a_signal_without_a_name_is_carried_as_128_and_its_number(tmp_path: Path) -> None:
    live = LiveRun(tmp_path, argv("import os; os.kill(os.getpid(), 35)"))
    assert live.end() == 128 + 35
    assert live.verdict()["first"]["signal"] == "SIGRTMIN+1"


def test_a_programs_own_2_is_not_taken_for_ours(tmp_path: Path) -> None:
    live = LiveRun(tmp_path, argv("import sys; sys.exit(2)"))
    assert live.end() == 2
    assert live.verdict()["class"] == "failed"


@pytest.mark.parametrize("closing", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_do_not_matter(tmp_path: Path, closing: str) -> None:
    (tmp_path / "job.yaml").write_text(two_by_two("pass"))
    line = f"{sys.executable} -m launch run {tmp_path}/job.yaml --runs {tmp_path}/runs {closing}"
    done = subprocess.run(["bash", "-c", line], timeout=30, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


def test_a_full_disk_under_standard_output_is_said(tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m launch --help >/dev/full"], timeout=30, capture_output=True, text=True
    )
    assert (done.returncode, len(done.stderr.splitlines())) == (74, 1)


def test_a_name_given_outside_is_held_to_the_same_rule(tmp_path: Path) -> None:
    live = LiveRun(tmp_path, argv("pass"), "--name", "../escaped")
    assert live.end() == 65
    assert not (tmp_path / "runs").exists()
    named = tmp_path / "named"
    named.mkdir()
    live = LiveRun(named, argv("pass"), "--name", "given")
    assert live.end() == 0
    assert live.run.run_id.startswith("given-")
    assert "name: given" in live.run.job.read_text()


def test_runs_of_one_second_are_listed_in_the_order_they_began(tmp_path: Path) -> None:
    assert re.fullmatch(r"job-\d{8}T\d{6}\.\d{3}Z-[0-9a-f]{6}", run_path(tmp_path, "job").name)
    names = [f"job-20260101T000000.{ms:03d}Z-{tail}" for ms, tail in ((1, "ffffff"), (2, "aaaaaa"), (10, "000000"))]
    for name in reversed(names):
        run = RunDir(tmp_path / name)
        make_run(run)
        run.events.touch()
    assert [run.run_id for run in list_runs(tmp_path)] == names


def test_a_missing_program_is_said_with_127(tmp_path: Path) -> None:
    live = LiveRun(tmp_path, "command: [no-such-program-at-all]\n")
    assert live.end() == 127
    assert "command not found: 'no-such-program-at-all'" in live.err


def test_torch_programs_meet_at_the_store_that_the_agent_hosts(tmp_path: Path) -> None:
    code = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print(total.item(), os.environ["TORCHELASTIC_USE_AGENT_STORE"])
dist.destroy_process_group()
"""
    live = LiveRun(tmp_path, two_by_two(code))
    assert live.end() == 0, live.err
    assert live.out == "4.0 True\n"


def test_setup_lines_run_once_a_node_and_a_failing_one_refuses_the_job(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    live = LiveRun(tmp_path, f"nodes: 2\nsetup: ['echo here >> {mark}']\n" + argv("pass"))
    assert live.end() == 0, live.err
    assert mark.read_text() == "here\n" * 2
    again = tmp_path / "again"
    again.mkdir()
    failing = LiveRun(again, "setup: ['echo about to fail', 'false', 'echo not reached']\n" + argv("pass"))
    assert failing.end() == 78
    assert "setup: ended with code 1: about to fail" in failing.err


# Stopping -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("job", [two_by_two(STUBBORN), TRAINING], ids=["stubborn", "training"])
def test_nothing_is_left_after_the_supervisor_is_killed(tmp_path: Path, job: str) -> None:
    live = LiveRun(tmp_path, job)
    live.wait_for("started", 2)
    if "train" in job:
        live.wait_for("joined")
    else:
        live.wait_for_output("ready", 3)
    run_id = live.run.run_id
    assert len(of_run(run_id)) >= 4
    live.process.kill()
    live.process.wait()
    wait_until(lambda: not of_run(run_id), "the ranks to end with their supervisor")
    live.process.communicate()


def test_ctrl_c_ends_stubborn_ranks_after_the_grace(tmp_path: Path) -> None:
    live = LiveRun(tmp_path, two_by_two(STUBBORN))
    live.wait_for("started", 2)
    for rank in range(4):
        live.wait_for_output("ready", rank)
    live.interrupt()
    assert live.end() == 130
    assert not live.left()
    assert live.verdict()["message"] == "stopped by Ctrl-C"
    (ended,) = live.events("ended")
    assert ended["class"] == "stopped"


def test_a_second_ctrl_c_does_not_wait_for_the_grace(tmp_path: Path) -> None:
    live = LiveRun(tmp_path, two_by_two(STUBBORN).replace("grace_s: 1", "grace_s: 1000"))
    live.wait_for("started", 2)
    live.wait_for_output("ready", 0)
    live.interrupt()
    live.wait_for("stopping")
    live.interrupt()
    assert live.end() == 130
    assert not live.left()


def test_ctrl_c_before_the_ranks_have_started_ends_at_once(tmp_path: Path) -> None:
    live = LiveRun(tmp_path, TRAINING)
    live.wait_for("submitted")
    live.interrupt()
    assert live.end() == 130
    assert not live.left()


def test_ranks_may_end_by_themselves_within_the_grace(tmp_path: Path) -> None:
    code = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit('saved')); " + SLEEP
    live = LiveRun(tmp_path, two_by_two(code).replace("grace_s: 1", "grace_s: 1000"))
    live.wait_for("started", 2)
    for rank in range(4):
        live.wait_for_output("ready", rank)
    live.interrupt()
    assert live.end() == 130
    assert live.run.attempt(0).err(2).read_text() == "saved\n"


def test_background_children_of_a_rank_end_with_it(tmp_path: Path) -> None:
    code = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'])"
    live = LiveRun(tmp_path, two_by_two(code))
    assert live.end() == 0
    assert not live.left()


def test_a_killed_agent_loses_its_node_and_the_run_says_which(tmp_path: Path) -> None:
    live = LiveRun(tmp_path, two_by_two(SLEEP))
    live.wait_for("started", 2)
    record = json.loads(live.run.attempt(0).node(1).read_text())
    assert start_ticks(record["pid"]) == record["pid_start"]
    os.kill(record["pid"], signal.SIGKILL)
    assert live.end() == 69
    first = live.verdict()["first"]
    assert (first["rank"], first["node"]) == (None, 1)
    assert not live.left()


def test_an_agent_killed_before_it_answers_ends_the_run_at_once(tmp_path: Path) -> None:
    live = LiveRun(tmp_path, two_by_two(SLEEP, start_timeout_s=1000))
    live.wait_for("submitted")
    agents: list[int] = []

    def found() -> bool:
        agents[:] = [pid for pid in descendants(live.process.pid) if "launch.agent" in command_line(pid)]
        return bool(agents)

    wait_until(found, "an agent")
    os.kill(agents[0], signal.SIGKILL)
    assert live.end() == 69
    assert "Traceback" not in live.err
    assert not live.left()


def test_a_killed_keeper_loses_its_node_without_a_traceback(tmp_path: Path) -> None:
    live = LiveRun(tmp_path, two_by_two(SLEEP))
    keeper = int(Path(f"/proc/{live.pid_of(2)}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(keeper, signal.SIGKILL)
    assert live.end() == 69
    assert "Traceback" not in live.err
    assert "keeper has gone" in live.verdict()["message"]
    assert not live.left()


def test_a_frozen_keeper_does_not_survive_its_run(tmp_path: Path) -> None:
    live = LiveRun(tmp_path, two_by_two(SLEEP))
    keeper = int(Path(f"/proc/{live.pid_of(2)}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(keeper, signal.SIGSTOP)
    run_id = live.run.run_id
    live.process.kill()
    wait_until(lambda: not of_run(run_id), "the frozen keeper and its ranks to end")
    live.process.communicate()


def test_a_frozen_agent_is_noticed_by_its_silence(tmp_path: Path) -> None:
    live = LiveRun(tmp_path, two_by_two(SLEEP))
    live.wait_for("started", 2)
    pid = json.loads(live.run.attempt(0).node(0).read_text())["pid"]
    os.kill(pid, signal.SIGSTOP)
    assert live.end() == 69
    assert "silent" in live.verdict()["message"]
    assert not live.left()


# Deadlines, folders, disks ------------------------------------------------------------------------------------------


def test_a_rank_that_never_reaches_the_rendezvous_is_named(tmp_path: Path) -> None:
    code = (
        "import os, time\nif os.environ['RANK'] == '2': time.sleep(1000)\n"
        "import torch.distributed as dist; dist.init_process_group('gloo')"
    )
    live = LiveRun(tmp_path, two_by_two(code, start_timeout_s=12))  # three of them import torch meanwhile
    assert live.end() == 124
    assert "rank 2 on node 1" in live.verdict()["message"]
    assert "rank 0" not in live.verdict()["message"]


def test_training_ranks_that_never_come_are_named(tmp_path: Path) -> None:
    live = LiveRun(tmp_path, TRAINING + "start_timeout_s: 3\n")
    live.wait_for("submitted")
    (warm,) = [pid for pid in descendants(live.process.pid) if "jobs.warm" in command_line(pid)]
    os.kill(warm, signal.SIGSTOP)  # it is importing torch: no rank has been forked
    assert live.end() == 124
    assert "rank 0 on node 0, rank 1 on node 1" in live.verdict()["message"]
    assert not live.left()


def test_a_program_that_meets_nobody_has_no_start_time_out(tmp_path: Path) -> None:
    live = LiveRun(tmp_path, two_by_two("import time; time.sleep(3)", start_timeout_s=1))
    assert live.end() == 0, live.err


def test_an_unwritable_run_folder_is_refused_before_anything_starts(tmp_path: Path) -> None:
    blocked = tmp_path / "runs"
    blocked.write_text("a file where the folder should be")
    job = tmp_path / "job.yaml"
    job.write_text(argv("pass"))
    done = subprocess.run(
        [sys.executable, "-m", "launch", "run", str(job), "--runs", str(blocked)], capture_output=True, text=True
    )
    assert done.returncode == 73
    assert done.stderr.startswith("muster: ")
    assert "--runs DIR" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_full_disk_under_the_supervisor_is_said_and_changes_no_verdict(tmp_path: Path) -> None:
    live = LiveRun(tmp_path, two_by_two(SLEEP))
    live.wait_for("started", 2)
    run_id, events = live.run.run_id, live.run.events
    events.unlink()
    events.symlink_to("/dev/full")
    os.kill(json.loads(live.run.attempt(0).node(1).read_text())["ranks"][0]["pid"], signal.SIGKILL)
    assert live.end() == 128 + signal.SIGKILL
    assert "No space left on device; free some space" in live.err
    assert "was killed by SIGKILL" in live.err
    assert not of_run(run_id)


def test_a_full_disk_under_rank_0_ends_the_run_with_74_and_keeps_what_was_written(tmp_path: Path) -> None:
    live = LiveRun(tmp_path, TRAINING)
    wait_until(lambda: live.run.metrics.is_file() and len(list(read_lines(live.run.metrics))) >= 2, "two steps")
    kept = tmp_path / "kept.jsonl"
    live.run.metrics.rename(kept)
    live.run.metrics.symlink_to("/dev/full")
    assert live.end() == 74
    assert "No space left on device" in live.err
    assert len(list(read_lines(kept))) >= 2


# Two runs at once ---------------------------------------------------------------------------------------------------


def test_two_runs_on_one_machine_do_not_touch_each_other(tmp_path: Path) -> None:
    first_folder, second_folder = tmp_path / "first", tmp_path / "second"
    first_folder.mkdir()
    second_folder.mkdir()
    first, second = LiveRun(first_folder, two_by_two(SLEEP)), LiveRun(second_folder, two_by_two(SLEEP))
    first.wait_for("started", 2)
    second.wait_for("started", 2)
    assert first.events("attempt")[0]["master_port"] != second.events("attempt")[0]["master_port"]
    first.interrupt()
    assert first.end() == 130
    assert len(second.left()) >= 4
    second.interrupt()
    assert second.end() == 130
