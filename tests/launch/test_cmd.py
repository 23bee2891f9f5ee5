"""`muster cmd`: the lines to paste, run by real shells in any order; what a program sees is what the job file says."""

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs.files import read_lines
from jobs.rundir import list_runs
from launch.agent import TOKEN
from launch.processes import of_run
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
HERE = ("--master-addr", "127.0.0.1")


def quiet_environment() -> dict[str, str]:
    """An environment in which nobody has set ranks."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("MUSTER", "RANK", "GLOO"))}


@pytest.fixture(autouse=True)
def _own_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


@pytest.fixture
def lines(tmp_path: Path, muster_json: Callable[..., Any]) -> Callable[..., dict[int, str]]:
    """Return a function that gives the lines of a job by node; `job` is YAML text or plain values."""

    def of(job: Any, *options: str) -> dict[int, str]:
        path = tmp_path / "job.yaml"
        path.write_text(job if isinstance(job, str) else json.dumps(job))
        which = () if "--node" in options else ("--all",)
        return {row["node"]: row["line"] for row in muster_json("cmd", str(path), *which, *options)}

    return of


class Shells:
    """The shells that lines are pasted into."""

    def __init__(self) -> None:
        self.started: list[subprocess.Popen[str]] = []

    def paste(self, line: str) -> subprocess.Popen[str]:
        shell = subprocess.Popen(
            ["bash", "-c", line],
            env=quiet_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.started.append(shell)
        return shell

    def end(self) -> tuple[list[int], list[str]]:
        """Wait for all shells; return their codes and outputs in the order of pasting."""
        said = [shell.communicate(timeout=50)[0] for shell in self.started]
        return [shell.returncode for shell in self.started], said


@pytest.fixture
def shells() -> Iterator[Shells]:
    made = Shells()
    yield made
    for shell in made.started:
        if shell.poll() is None:
            os.killpg(shell.pid, signal.SIGKILL)
        if shell.stdout is not None and not shell.stdout.closed:
            shell.communicate()


def words(line: str) -> list[str]:
    return shlex.split(line.rpartition(" && ")[2])


def after(option: str, line: str) -> str:
    found = words(line)
    return found[found.index(option) + 1]


# Text -----------------------------------------------------------------------------------------------------------------


def test_all_lines_agree_on_port_and_token_also_when_they_are_printed_one_by_one(lines) -> None:
    found = lines(TRAIN, "--master-addr", "10.10.1.1")
    again = lines(TRAIN, "--master-addr", "10.10.1.1", "--node", "1")
    assert again == {1: found[1]}
    assert words(found[0])[0] == words(found[1])[0]
    assert words(found[0])[0].startswith(f"{TOKEN}=")
    assert after("--connect", found[1]) == f"10.10.1.1:{after('--port', found[0])}"
    assert 61_000 <= int(after("--port", found[0])) <= 65_535


def test_another_job_or_another_user_has_another_token(lines, tmp_path, monkeypatch) -> None:
    tokens = {words(lines(TRAIN, *HERE)[0])[0], words(lines(TRAIN, *HERE, "--set", "train.steps=3")[0])[0]}
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "other"))
    tokens.add(words(lines(TRAIN, *HERE)[0])[0])
    assert len(tokens) == 3
    secret = tmp_path / "other" / "muster" / "secret"
    assert secret.stat().st_mode & 0o777 == 0o600


def test_node_0_is_told_the_job_and_what_was_overridden_the_others_nothing(lines, tmp_path) -> None:
    options = ("--set", "train.steps=3", "--name", "other", "--port", "4242", "--master-addr", "10.10.1.1")
    found = lines(TRAIN, *options)
    assert words(found[0])[5:] == [
        *("run", str(tmp_path / "job.yaml"), "--set", "train.steps=3", "--set", 'name="other"'),
        *("--on", "hand", "--port", "4242", "--master-addr", "10.10.1.1", "--runs", str(tmp_path / "runs")),
    ]
    assert str(tmp_path / "job.yaml") not in found[1]


def test_nothing_of_the_users_stands_in_the_lines_but_the_job_files_name(lines) -> None:
    job = {"nodes": 2, "env": {"SECRET": "hunter2"}, "command": ["prog", "--password", "hunter2"]}
    assert not any("hunter2" in line for line in lines(job, *HERE).values())


def test_addresses_come_from_the_hosts_where_they_have_them(lines, tmp_path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("alpha address=10.10.1.7\nbeta address=10.10.1.9\n")
    found = lines(TRAIN, "-H", str(hosts))
    assert after("--connect", found[1]).startswith("10.10.1.7:")
    assert after("--nodelist", found[0]) == "alpha,beta"


def test_without_an_address_of_node_0_the_error_says_how_to_give_one(muster, tmp_path) -> None:
    (tmp_path / "job.yaml").write_text(TRAIN)
    code, out, err = muster("cmd", str(tmp_path / "job.yaml"), "--all")
    assert (code, out) == (2, "")
    assert "give --master-addr ADDRESS" in err


def test_the_plain_output_is_the_same_lines(lines, muster, tmp_path) -> None:
    found = lines(TRAIN, *HERE)
    assert muster("cmd", str(tmp_path / "job.yaml"), "--all", *HERE) == (0, f"{found[0]}\n{found[1]}\n", "")
    assert muster("cmd", str(tmp_path / "job.yaml"), "--node", "1", *HERE) == (0, f"{found[1]}\n", "")


@pytest.mark.parametrize("node", ["2", "-1"])
def test_a_node_that_the_job_does_not_have_is_a_usage_error(node: str, muster, tmp_path) -> None:
    (tmp_path / "job.yaml").write_text(TRAIN)
    code, out, err = muster("cmd", str(tmp_path / "job.yaml"), "--node", node, *HERE)
    assert (code, out) == (2, "")
    assert err == f"muster: --node: this job has nodes 0 to 1, got {node}\n"


def test_a_rank_variable_in_the_job_is_refused_as_it_is_by_run(muster, tmp_path) -> None:
    (tmp_path / "job.yaml").write_text("env: {RANK: '7'}\ncommand: [prog]\n")
    code, out, err = muster("cmd", str(tmp_path / "job.yaml"), "--node", "0", *HERE)
    assert (code, out) == (78, "")
    assert "env.RANK" in err


# Run by shells --------------------------------------------------------------------------------------------------------


@pytest.mark.ranks
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_every_argument_and_value_survives_whatever_the_order(order, lines, shells, tmp_path) -> None:
    workdir = tmp_path / "it's a $folder"
    workdir.mkdir()
    dumps = tmp_path / "dumps"
    dumps.mkdir()
    env = {"DUMPS": str(dumps), **{f"VALUE_{number}": text for number, text in enumerate(NASTY)}}
    job = {"nodes": 3, "workdir": str(workdir), "env": env, "command": [sys.executable, "-c", DUMP, *NASTY]}
    found = lines(job, *HERE)
    for node in order:
        shells.paste(found[node])
    codes, said = shells.end()
    assert codes == [0, 0, 0], said
    for rank in range(3):
        seen = json.loads((dumps / f"{rank}.json").read_text())
        assert seen["argv"] == NASTY
        assert {name: seen["env"][name] for name in env} == env
        assert seen["cwd"] == str(workdir)
        assert TOKEN not in seen["env"]
        assert seen["env"]["NODE_RANK"] == str(rank)


@pytest.mark.ranks
def test_the_code_of_the_rank_that_failed_is_that_of_every_line(lines, shells) -> None:
    found = lines({"nodes": 2, "command": ["bash", "-c", "exit $((RANK == 1 ? 7 : 0))"]}, *HERE)
    for node in (0, 1):
        shells.paste(found[node])
    codes, said = shells.end()
    assert codes == [7, 7], said


@pytest.mark.ranks
def test_two_nodes_train_in_one_run_and_a_jobs_folder_of_the_users_does_not_matter(lines, shells, tmp_path) -> None:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "__init__.py").write_text("raise SystemExit('the wrong jobs')\n")
    found = lines(f"workdir: {tmp_path}\n{TRAIN}", *HERE)
    for node in (1, 0):
        shells.paste(found[node])
    codes, said = shells.end()
    assert codes == [0, 0], said
    (run,) = list_runs(tmp_path / "runs")
    assert [row["step"] for row in read_lines(run.metrics) if "step_s" in row] == [1, 2]
    (verdict,) = read_lines(run.attempts)
    assert verdict["code"] == 0


@pytest.mark.ranks
@pytest.mark.parametrize(("killed", "code"), [(1, 69), (0, None)])
def test_a_line_that_is_killed_ends_the_run(killed: int, code: int | None, lines, shells, tmp_path) -> None:
    found = lines({"nodes": 2, "grace_s": 1, "command": ["sleep", "1000"]}, *HERE)
    pasted = [shells.paste(found[node]) for node in (0, 1)]
    wait_until(lambda: list_runs(tmp_path / "runs"), "the run")
    (run,) = list_runs(tmp_path / "runs")
    wait_until(lambda: sum(row["event"] == "started" for row in read_lines(run.events)) == 2, "both nodes")
    os.killpg(pasted[killed].pid, signal.SIGKILL)
    wait_until(lambda: not of_run(run.run_id), "the end of all ranks")
    other = pasted[1 - killed]
    other.communicate(timeout=50)
    assert other.returncode == (code if killed else 69)


@pytest.mark.ranks
def test_ctrl_c_at_node_0_ends_all_lines(lines, shells, tmp_path) -> None:
    found = lines({"nodes": 2, "grace_s": 1, "command": ["sleep", "1000"]}, *HERE)
    first = shells.paste(found[0])
    shells.paste(found[1])
    wait_until(lambda: list_runs(tmp_path / "runs"), "the run")
    (run,) = list_runs(tmp_path / "runs")
    wait_until(lambda: sum(row["event"] == "started" for row in read_lines(run.events)) == 2, "both nodes")
    os.killpg(first.pid, signal.SIGINT)
    codes, said = shells.end()
    assert codes == [130, 130], said
    assert not of_run(run.run_id)


@pytest.mark.ranks
def test_a_second_agent_for_a_node_and_one_with_another_token_are_turned_away(lines, shells) -> None:
    found = lines({"nodes": 2, "command": ["true"]}, *HERE)
    stranger = (
        found[1].replace(words(found[1])[0], f"{TOKEN}=wrong").replace("--dial-timeout-s 600", "--dial-timeout-s 5")
    )
    shells.paste(found[0])
    turned_away = shells.paste(stranger)
    turned_away.communicate(timeout=50)
    assert turned_away.returncode == 78
    shells.paste(found[1])
    codes, said = shells.end()
    assert codes == [0, 78, 0], said
