"""`muster run`, as a user starts it: real agents, a real warm process, real ranks. What ranks say, and end with."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from muster.jobs.runfolder.rundir import RunDir, list_runs, make_run, run_path
from support.live import SLEEP, TRAINING, LiveRun, argv, two_by_two, wait_until
from support.programs import Programs

pytestmark = [pytest.mark.command, pytest.mark.ranks, pytest.mark.slow, pytest.mark.usefixtures("forked_supervisors")]


def test_every_rank_gets_its_variables_and_its_own_log_and_rank_0_is_shown(tmp_path: Path) -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "MASTER_ADDR")
    code = f"import os; print(*[os.environ[name] for name in {names}], os.environ['MASTER_PORT'])"
    live = LiveRun(tmp_path, two_by_two(code))
    assert live.end() == 0, live.err
    port = live.events("attempt")[0]["master_port"]
    logs = [live.run.attempt(0).out(rank).read_text() for rank in range(4)]
    assert logs == [f"{rank} 4 {rank % 2} 2 {rank // 2} {rank // 2} 127.0.0.1 {port}\n" for rank in range(4)]
    assert live.out == logs[0]
    assert "done in" in live.err
    assert not any(log in live.err for log in logs)


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


def test_a_dead_rank_is_the_cause_and_those_that_lost_it_are_victims(tmp_path: Path) -> None:
    live = LiveRun(tmp_path, TRAINING)
    live.wait_for("joined")
    os.kill(live.pid_of(1), signal.SIGKILL)
    assert live.end() == 128 + signal.SIGKILL
    verdict = live.verdict()
    assert [verdict["first"][key] for key in ("rank", "signal", "code")] == [1, "SIGKILL", None]
    assert [victim["rank"] for victim in verdict["victims"]] == [0]
    assert not live.left()


def test_a_rank_that_prints_megabytes_keeps_its_own_code(tmp_path: Path) -> None:
    code = "import sys; sys.stdout.write(('yes' * 13 + '\\n') * 100_000); sys.stderr.write('x' * 4_000_000); exit(9)"
    live = LiveRun(tmp_path, argv(code))
    assert live.end() == 9
    assert live.out == ("yes" * 13 + "\n") * 100_000
    assert all(len(line) < 2_000 for line in live.verdict()["first"]["last_lines"])


def test_ranks_that_fail_at_the_same_moment_are_one_failure(tmp_path: Path) -> None:
    """Once a stop order buried ranks whose reports the selector still held: the rank parent fell over a closed pipe."""
    runs = []
    for number in range(4):
        folder = tmp_path / str(number)
        folder.mkdir()
        runs.append(LiveRun(folder, "ranks_per_node: 8\n" + argv("import sys; sys.exit(64)")))
    for live in runs:
        assert live.end() == 64, live.err
        assert "Traceback" not in live.err
        assert live.verdict()["class"] == "failed"


@pytest.mark.parametrize(
    ("command", "code", "signal", "said"),
    [
        (argv("import os; os.kill(os.getpid(), 35)"), 128 + 35, "SIGRTMIN+1", ""),  # a signal without a name
        (argv("import sys; sys.exit(2)"), 2, None, ""),  # a program's own 2 is not taken for ours
        ("command: [no-such-program-at-all]\n", 127, None, "command not found: 'no-such-program-at-all'"),
    ],
)
def test_a_programs_end_is_the_exit_code(
    tmp_path: Path, command: str, code: int, signal: str | None, said: str
) -> None:
    live = LiveRun(tmp_path, command)
    assert live.end() == code
    assert (live.verdict()["class"], live.verdict()["first"]["signal"]) == ("signal" if signal else "failed", signal)
    assert said in live.err


@pytest.mark.parametrize("closing", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_do_not_matter(tmp_path: Path, closing: str) -> None:
    (tmp_path / "job.yaml").write_text(two_by_two("pass"))
    line = f"{sys.executable} -m muster run {tmp_path}/job.yaml --runs {tmp_path}/runs {closing}"
    done = subprocess.run(["bash", "-c", line], timeout=30, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


def test_a_full_disk_under_standard_output_is_said(tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m muster --help >/dev/full"], timeout=30, capture_output=True, text=True
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


def test_torch_programs_meet_at_the_store_that_the_agent_hosts(tmp_path: Path, programs: Programs) -> None:
    # A rank is a shell that hands its variables on, to a program that has imported torch already.
    rank = f"cd {tmp_path}; env -0 >$RANK; touch told-$RANK; until [ -e met ]; do sleep 0.1; done"
    live = LiveRun(tmp_path, f"nodes: 2\ncommand: {json.dumps(['sh', '-c', rank])}\n")
    (tmp_path / "program.py").write_text("""
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print(total.item(), os.environ["TORCHELASTIC_USE_AGENT_STORE"])
dist.destroy_process_group()
""")
    wait_until(lambda: len(list(tmp_path.glob("told-*"))) == 2, "the ranks' variables")
    told = [(tmp_path / rank).read_text().split("\0")[:-1] for rank in "01"]
    started = [
        programs.start(tmp_path / "program.py", env=dict(each.split("=", 1) for each in words)) for words in told
    ]
    assert [each.wait().stdout for each in started] == ["2.0 True\n"] * 2
    (tmp_path / "met").touch()
    assert live.end() == 0, live.err


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


def test_tee_shows_what_every_rank_prints_with_its_rank(tmp_path: Path) -> None:
    code = "import os, sys; print('of', os.environ['RANK']); print('so far 1 %\\rso far 9 %', file=sys.stderr)"
    live = LiveRun(tmp_path, two_by_two(code), "--tee")
    assert live.end() == 0, live.err
    assert sorted(live.out.splitlines()) == [f"[rank {rank}] of {rank}" for rank in range(4)]
    assert {f"[rank {rank}] so far 9 %" for rank in range(4)} < set(live.err.splitlines())


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
