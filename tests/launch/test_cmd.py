"""`muster cmd`: the lines to paste, run by real shells; what a program sees is compared with what the job file says."""

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jobs.ranks import RankEnv
from jobs.rundir import list_runs, read_lines
from launch.commands.cmd import _together
from launch.processes import start_ticks
from support.live import wait_until

DUMP = """
import json, os, sys
record = {"argv": sys.argv[1:], "env": dict(os.environ), "cwd": os.getcwd()}
with open(f"{os.environ['DUMPS']}/{os.environ['RANK']}.json", "w") as file:
    json.dump(record, file)
"""
NASTY = ["two words", "it's", 'a "quote"', "$HOME `id` \\n", "line one\nline two", "größe ∑ 🚀", "", "*", "-x", "a=b"]
TRAIN = """\
name: tiny
nodes: 2
train: {model: gpt-nano, data: synthetic, mode: allreduce, batch_size: 4, steps: 2, log_every: 1, evaluate: false}
"""


def quiet_environment() -> dict[str, str]:
    """An environment in which nobody has set ranks."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("MUSTER", "RANK", "GLOO"))}


def bash(line: str, **fields: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", line], env=quiet_environment(), capture_output=True, text=True, timeout=50, check=False, **fields
    )


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


@pytest.fixture
def lines(tmp_path: Path, muster_json: Callable[..., Any]) -> Callable[..., dict[int, str]]:
    """Return a function that gives the lines of a job by node; `job` is YAML text or plain values."""

    def of(job: Any, *options: str) -> dict[int, str]:
        path = tmp_path / "job.yaml"
        path.write_text(job if isinstance(job, str) else json.dumps(job))
        which = () if "--node" in options else ("--all",)
        return {row["node"]: row["line"] for row in muster_json("cmd", str(path), *which, *options)}

    return of


@pytest.fixture
def dumped(tmp_path: Path) -> Callable[[], list[dict[str, Any]]]:
    """Return a function that reads what each rank's program saw, in rank order."""
    folder = tmp_path / "dumps"
    folder.mkdir()
    return lambda: [json.loads((folder / f"{rank}.json").read_text()) for rank in range(len(list(folder.iterdir())))]


def dump_job(tmp_path: Path, **keys: Any) -> dict[str, Any]:
    env = {"DUMPS": str(tmp_path / "dumps"), **keys.pop("env", {})}
    return {"command": [sys.executable, "-c", DUMP, *NASTY], "env": env, **keys}


# Text -----------------------------------------------------------------------------------------------------------------


def test_a_line_of_a_command_is_its_folder_its_variables_and_its_argv(lines) -> None:
    job = {"nodes": 2, "workdir": "/srv/my work", "env": {"A": "b c"}, "command": ["prog", "it's"]}
    found = lines(job, "--node", "1", "--master-ip", "10.10.1.1", "--master-port", "4242")
    (folder, words) = found[1].split(" && ")
    assert list(found) == [1]
    assert shlex.split(folder) == ["cd", "/srv/my work"]
    first, path, *pairs = shlex.split(words)
    rank = RankEnv(1, 2, 0, 1, 1, 2, "10.10.1.1", 4242).variables()
    shared = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "A": "b c"}
    assert (first, path) == ("env", f"PATH={Path(sys.executable).parent}:$PATH")
    assert dict(pair.split("=", 1) for pair in pairs[:-2]) == {**shared, **rank}
    assert pairs[-2:] == ["prog", "it's"]


def test_a_line_of_a_bench_starts_its_module_where_no_folder_can_shadow_it(lines) -> None:
    words = shlex.split(lines({"start_timeout_s": 7.5, "bench": {"operation": "hello"}})[0])
    expected = [*("-I", "-m", "collectives_bench"), *("--operation", "hello", "--start-timeout-s", "7.5")]
    assert words[words.index(sys.executable) :] == [sys.executable, *expected]


def test_a_line_of_a_training_names_its_rank_by_flags_and_passes_on_what_was_overridden(lines, tmp_path) -> None:
    options = ("--set", "train.steps=3", "--name", "other", "--master-ip", "10.10.1.1", "--master-port", "4242")
    words = shlex.split(lines(TRAIN, *options)[1])
    assert words[words.index(sys.executable) :] == [
        *(sys.executable, "-I", "-m", "jobs.train", str(tmp_path / "job.yaml")),
        *("--master-ip", "10.10.1.1", "--master-port", "4242", "--num-nodes", "2", "--rank", "1"),
        *("--set", "train.steps=3", "--set", 'name="other"', "--runs", str(tmp_path / "runs")),
    ]


def test_several_ranks_of_a_training_are_told_how_many_share_their_node(lines) -> None:
    found = lines(TRAIN, "--set", "ranks_per_node=2")
    for node, line in found.items():
        for rank in (2 * node, 2 * node + 1):
            assert f"--num-nodes 2 --rank {rank} --ranks-per-node 2 " in line


def test_the_plain_output_is_the_same_lines(lines, muster, tmp_path) -> None:
    found = lines(TRAIN)
    assert muster("cmd", str(tmp_path / "job.yaml"), "--all") == (0, f"{found[0]}\n{found[1]}\n", "")
    assert muster("cmd", str(tmp_path / "job.yaml"), "--node", "1") == (0, f"{found[1]}\n", "")


@pytest.mark.parametrize("node", ["2", "-1"])
def test_a_node_that_the_job_does_not_have_is_a_usage_error(node: str, muster, tmp_path) -> None:
    (tmp_path / "job.yaml").write_text(TRAIN)
    code, out, err = muster("cmd", str(tmp_path / "job.yaml"), "--node", node)
    assert (code, out) == (2, "")
    assert err == f"muster: --node: this job has nodes 0 to 1, got {node}\n"


def test_a_rank_variable_in_the_job_is_refused_as_it_is_by_run(muster, tmp_path) -> None:
    (tmp_path / "job.yaml").write_text("env: {RANK: '7'}\ncommand: [prog]\n")
    code, out, err = muster("cmd", str(tmp_path / "job.yaml"), "--node", "0")
    assert (code, out) == (78, "")
    assert "env.RANK" in err


# Run by a shell -------------------------------------------------------------------------------------------------------


def test_every_argument_and_value_survives_the_shell(lines, dumped, tmp_path) -> None:
    workdir = tmp_path / "it's a $folder"
    workdir.mkdir()
    env = {f"VALUE_{number}": text for number, text in enumerate(NASTY)}
    (line,) = lines(dump_job(tmp_path, env=env, workdir=str(workdir))).values()
    done = bash(line)
    assert (done.returncode, done.stderr) == (0, "")
    (seen,) = dumped()
    assert seen["argv"] == NASTY
    assert {name: seen["env"][name] for name in env} == env
    assert seen["cwd"] == str(workdir)


@pytest.mark.parametrize("shell", [name for name in ("bash", "dash", "zsh") if shutil.which(name)])
def test_all_ranks_of_a_node_run_side_by_side_each_with_its_own_variables(shell, lines, dumped, tmp_path) -> None:
    job = dump_job(tmp_path, nodes=1, ranks_per_node=3)
    done = subprocess.run([shell, "-c", lines(job)[0]], env=quiet_environment(), timeout=50, check=False)
    assert done.returncode == 0
    seen = dumped()
    assert [each["argv"] for each in seen] == [NASTY] * 3
    expected = [RankEnv(rank, 3, rank, 3, 0, 1, "127.0.0.1", 29500).variables() for rank in range(3)]
    assert [{name: each["env"][name] for name in expected[0]} for each in seen] == expected


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_the_lines_exit_code_is_that_of_the_rank_that_failed(failing: int, lines) -> None:
    """A bare `wait` returned 0 whatever had happened."""
    job = {"ranks_per_node": 3, "command": ["bash", "-c", f"exit $((RANK == {failing} ? 7 : 0))"]}
    assert bash(lines(job)[0]).returncode == 7
    assert bash(lines({**job, "command": ["true"]})[0]).returncode == 0


def test_a_rank_that_fails_long_before_the_last_one_ends_still_counts(lines) -> None:
    job = {"ranks_per_node": 2, "command": ["bash", "-c", "if [ $RANK = 0 ]; then exit 5; fi; sleep 0.3; echo last"]}
    done = bash(lines(job)[0])
    assert (done.returncode, done.stdout) == (5, "last\n")


def test_the_shell_that_the_line_is_pasted_into_keeps_its_arguments_and_its_other_children() -> None:
    line = _together(["true", "false"])
    done = bash(f"set -- mine; sleep 30 & other=$!; {line}; echo $? $*; kill $other")
    assert done.stdout == "1 mine\n"


def test_ctrl_c_ends_all_ranks_of_the_line(tmp_path) -> None:
    """A shell's background processes ignore SIGINT, so the line must pass it on."""
    program = f"import os, time; open(f'{tmp_path}/{{os.getpid()}}', 'w').close(); time.sleep(50)"
    line = _together([shlex.join([sys.executable, "-c", program])] * 2)
    with subprocess.Popen(["bash", "-c", line], start_new_session=True) as shell:
        wait_until(lambda: len(list(tmp_path.iterdir())) == 2, "two ranks")
        os.killpg(shell.pid, signal.SIGINT)
        assert shell.wait(timeout=20) != 0
    pids = [int(path.name) for path in tmp_path.iterdir()]
    wait_until(lambda: not any(map(start_ticks, pids)), "the end of both ranks")


def test_a_missing_folder_and_a_failing_setup_line_stop_the_line_before_any_rank(lines, tmp_path) -> None:
    job = {"ranks_per_node": 2, "workdir": str(tmp_path / "gone"), "command": ["echo", "started"]}
    done = bash(lines(job)[0])
    assert (done.returncode, done.stdout) == (1, "")
    setup = ["echo in $WHERE", "exit 9", "echo not here"]
    done = bash(lines({**job, "workdir": str(tmp_path), "env": {"WHERE": "setup"}, "setup": setup})[0])
    assert (done.returncode, done.stdout) == (9, "in setup\n")


def test_the_sites_variables_reach_the_ranks_and_the_job_wins(lines, dumped, tmp_path) -> None:
    site = tmp_path / "site.yaml"
    site.write_text("env: {ONLY_SITE: 'a b', BOTH: site}\n")
    (line,) = lines(dump_job(tmp_path, env={"BOTH": "job"}), "--site", str(site)).values()
    assert bash(line).returncode == 0
    (seen,) = dumped()
    assert (seen["env"]["ONLY_SITE"], seen["env"]["BOTH"]) == ("a b", "job")


def test_python_is_the_one_muster_runs_with_before_the_path_of_the_shell_that_is_pasted_into(lines, tmp_path) -> None:
    job = {"command": ["bash", "-c", "echo $PATH"]}
    done = subprocess.run(["bash", "-c", lines(job)[0]], env={"PATH": "/usr/bin:/bin"}, capture_output=True, check=True)
    assert done.stdout.decode() == f"{Path(sys.executable).parent}:/usr/bin:/bin\n"
    assert bash(lines({**job, "env": {"PATH": "/bin"}})[0]).stdout == "/bin\n"


@pytest.mark.ranks
def test_the_lines_of_two_nodes_pasted_into_two_shells_train_in_one_run(lines, tmp_path) -> None:
    (tmp_path / "jobs").mkdir()  # a user's own folder of this name, where the ranks run, must not matter
    (tmp_path / "jobs" / "__init__.py").write_text("raise SystemExit('the wrong jobs')\n")
    found = lines(f"workdir: {tmp_path}\n{TRAIN}", "--master-port", str(free_port()))
    shells = [
        subprocess.Popen(
            ["bash", "-c", found[node]],
            env=quiet_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in (1, 0)
    ]
    outputs = [shell.communicate(timeout=50)[0] for shell in shells]
    assert [shell.returncode for shell in shells] == [0, 0], outputs
    (run,) = list_runs(tmp_path / "runs")
    assert [row["step"] for row in read_lines(run.metrics) if "step_s" in row] == [1, 2]
    (verdict,) = read_lines(run.attempts)
    assert verdict["code"] == 0
