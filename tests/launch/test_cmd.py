"""`muster cmd`: the lines to paste, run by real shells in any order; what a program sees is what the job file says."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from muster.jobs.basics.files import read_lines
from muster.jobs.basics.handshake import node_key
from muster.jobs.runfolder.rundir import RunDir, list_runs
from muster.launch.common.processes import of_run
from muster.launch.wire.keys import KEY, SECRET
from support.agents import closed_port
from support.live import wait_until

pytestmark = pytest.mark.slow

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


@pytest.fixture
def lines(tmp_path: Path, muster_json: Callable[..., Any]) -> Callable[..., dict[int, str]]:
    """Return a function that gives the lines of a job by node; `job` is YAML text or plain values."""

    def of(job: Any, *options: str) -> dict[int, str]:
        path = tmp_path / "job.yaml"
        path.write_text(job if isinstance(job, str) else json.dumps(job))
        return {row["node"]: row["line"] for row in muster_json("cmd", str(path), *options)}

    return of


class Shells:
    """The shells that lines are pasted into."""

    def __init__(self) -> None:
        self.started: list[subprocess.Popen[str]] = []

    def paste_all(self, lines: dict[int, str], *order: int) -> tuple[list[int], list[str]]:
        """Paste the lines of these nodes, and wait for all shells: see `end`."""
        for node in order:
            self.paste(lines[node])
        return self.end()

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


def begun(root: Path) -> RunDir:
    """Wait until both nodes of the run below `root` have started their ranks."""
    wait_until(lambda: list_runs(root), "the run")
    (run,) = list_runs(root)
    wait_until(lambda: sum(row["event"] == "started" for row in read_lines(run.events)) == 2, "both nodes")
    return run


def words(line: str) -> list[str]:
    return shlex.split(line.rpartition(" && ")[2])


def after(option: str, line: str) -> str:
    found = words(line)
    return found[found.index(option) + 1]


# Text -----------------------------------------------------------------------------------------------------------------


def test_all_lines_of_a_call_agree_on_the_port_and_the_keys_follow_from_the_secret(lines) -> None:
    found = lines({"nodes": 3, "command": ["true"]}, "--master-addr", "10.10.1.1")
    name, _, secret = words(found[0])[0].partition("=")
    assert (name, len(secret)) == (SECRET, 64)
    for node in (1, 2):
        assert words(found[node])[0] == f"{KEY}={node_key(secret, node)}"
        assert after("--connect", found[node]) == f"10.10.1.1:{after('--port', found[0])}"
        assert secret not in found[node]
    assert 61_000 <= int(after("--port", found[0])) <= 65_535


def test_node_0_finds_a_text_that_was_typed_relative_to_the_working_folder(lines, tmp_path) -> None:
    made = lines("workdir: /\n" + TRAIN, *HERE, "--set", "train.data={text: some.txt}")
    assert f'train.data.text="{Path.cwd() / "some.txt"}"' in words(made[0])


def test_node_0_is_told_the_network_of_the_ranks(lines) -> None:
    made = lines(TRAIN, *HERE, "--iface", "10.10.1.0/24")
    assert after("--iface", made[0]) == "10.10.1.0/24"
    assert "--iface" not in made[1]


def test_every_call_draws_a_fresh_secret_and_a_port(lines) -> None:
    calls = [lines(TRAIN, *HERE) for _ in range(4)]
    assert len({words(found[0])[0] for found in calls}) == 4
    assert len({words(found[1])[0] for found in calls}) == 4
    assert len({after("--port", found[0]) for found in calls}) > 1


def test_nothing_is_kept_for_the_next_call(lines, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    lines(TRAIN, *HERE)
    assert [path.name for path in tmp_path.iterdir()] == ["job.yaml"]


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
    code, out, err = muster("cmd", str(tmp_path / "job.yaml"))
    assert (code, out) == (2, "")
    assert "give --master-addr ADDRESS" in err
    assert "this machine has " in err


def test_the_plain_output_is_one_line_per_node_below_its_name(muster, tmp_path) -> None:
    (tmp_path / "job.yaml").write_text(TRAIN)
    code, out, err = muster("cmd", str(tmp_path / "job.yaml"), *HERE)
    name, first, other, second = out.splitlines()
    assert (code, err, name, other) == (0, "", "# node 0 (node0)", "# node 1 (node1)")
    assert words(first)[0].startswith(f"{SECRET}=")
    assert words(second)[0] == f"{KEY}={node_key(words(first)[0].partition('=')[2], 1)}"


def test_a_rank_variable_in_the_job_is_refused_as_it_is_by_run(muster, tmp_path) -> None:
    (tmp_path / "job.yaml").write_text("env: {RANK: '7'}\ncommand: [prog]\n")
    code, out, err = muster("cmd", str(tmp_path / "job.yaml"), *HERE)
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
    codes, said = shells.paste_all(found, *order)
    assert codes == [0, 0, 0], said
    for rank in range(3):
        seen = json.loads((dumps / f"{rank}.json").read_text())
        assert seen["argv"] == NASTY
        assert {name: seen["env"][name] for name in env} == env
        assert seen["cwd"] == str(workdir)
        assert not {SECRET, KEY} & set(seen["env"])
        assert seen["env"]["NODE_RANK"] == str(rank)


@pytest.mark.ranks
def test_the_code_of_the_rank_that_failed_is_that_of_every_line(lines, shells) -> None:
    found = lines({"nodes": 2, "command": ["bash", "-c", "exit $((RANK == 1 ? 7 : 0))"]}, *HERE)
    codes, said = shells.paste_all(found, 0, 1)
    assert codes == [7, 7], said


@pytest.mark.ranks
def test_two_nodes_train_in_one_run_and_a_jobs_folder_of_the_users_does_not_matter(lines, shells, tmp_path) -> None:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "__init__.py").write_text("raise SystemExit('the wrong jobs')\n")
    found = lines(f"workdir: {tmp_path}\n{TRAIN}", *HERE)
    codes, said = shells.paste_all(found, 1, 0)
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
    run = begun(tmp_path / "runs")
    os.killpg(pasted[killed].pid, signal.SIGKILL)
    wait_until(lambda: not of_run(run.run_id), "the end of all ranks")
    other = pasted[1 - killed]
    other.communicate(timeout=50)
    assert other.returncode == (code if killed else 69)


@pytest.mark.ranks
def test_node_0_says_until_when_it_waits_for_whom_and_ctrl_c_ends_the_wait(lines, shells) -> None:
    found = lines({"nodes": 3, "command": ["true"]}, *HERE)
    first = shells.paste(found[0])
    line = first.stdout.readline()
    assert re.fullmatch(r"waiting until \d\d:\d\d:\d\d for node 1 \(node1\), 2 \(node2\)\n", line)
    shells.paste(found[2])
    assert re.fullmatch(r"waiting until \d\d:\d\d:\d\d for node 1 \(node1\)\n", first.stdout.readline())
    os.killpg(first.pid, signal.SIGINT)
    codes, said = shells.end()
    assert codes == [130, 130], said
    assert "Traceback" not in "".join(said)


@pytest.mark.ranks
def test_ctrl_c_at_node_0_ends_all_lines(lines, shells, tmp_path) -> None:
    found = lines({"nodes": 2, "grace_s": 1, "command": ["sleep", "1000"]}, *HERE)
    first = shells.paste(found[0])
    shells.paste(found[1])
    run = begun(tmp_path / "runs")
    os.killpg(first.pid, signal.SIGINT)
    codes, said = shells.end()
    assert codes == [130, 130], said
    assert not of_run(run.run_id)


def shortened(line: str) -> str:
    """A line whose agent does not dial for ten minutes."""
    return line.replace("--dial-timeout-s 600", "--dial-timeout-s 5")


@pytest.mark.ranks
def test_a_line_of_another_call_is_refused_in_one_sentence_on_both_ends(lines, shells) -> None:
    free, job = closed_port(), {"nodes": 2, "command": ["true"]}
    found, other = (lines(job, *HERE, "--port", str(free)) for _ in range(2))
    first = shells.paste(found[0])
    stranger = shells.paste(shortened(other[1]))
    said, _ = stranger.communicate(timeout=50)
    assert stranger.returncode == 78
    assert said.splitlines(keepends=True)[1:] == [
        f"muster agent on {socket.gethostname()}: the program that answers at 127.0.0.1:{free} does not hold this "
        "agent's key, so this agent ends; paste the lines of one muster cmd, and let no other program use that port\n"
    ]
    assert first.stdout is not None
    line = ""
    while "refused" not in line:
        line = first.stdout.readline()
        assert line, "node 0 has ended"
    assert line == f"muster: refused 1 connection to port {free}: 1 x hung up; last from 127.0.0.1\n"
    codes, told = shells.paste_all(found, 1)
    assert codes == [0, 78, 0], told


@pytest.mark.ranks
def test_the_line_of_one_node_does_not_speak_for_another(lines, shells) -> None:
    found = lines({"nodes": 3, "command": ["true"]}, *HERE)
    shells.paste(found[0])
    posing = shells.paste(shortened(found[1]).replace("--node 1", "--node 2"))
    posing.communicate(timeout=50)
    assert posing.returncode == 78
    codes, said = shells.paste_all(found, 1, 2)
    assert codes == [0, 78, 0, 0], said


@pytest.mark.ranks
def test_a_line_that_is_pasted_twice_is_one_node(lines, shells, tmp_path) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    command = ["sh", "-c", f"touch {marks}/$RANK.$$; while [ ! -e {tmp_path}/go ]; do sleep 0.05; done"]
    found = lines({"nodes": 2, "command": command}, *HERE)
    shells.paste(found[0])
    twice = [shells.paste(shortened(found[1])) for _ in range(2)]
    wait_until(lambda: any(shell.poll() is not None for shell in twice), "the end of one of the two")
    wait_until(lambda: len(list(marks.iterdir())) == 2, "both ranks")
    assert sorted(mark.name[0] for mark in marks.iterdir()) == ["0", "1"]
    (tmp_path / "go").touch()
    codes, said = shells.end()
    # The other line is turned away (78) if both dialled before one was let in, else it finds nobody who expects it.
    assert (codes[0], sorted(codes[1:])) in ((0, [0, 78]), (0, [0, 69])), said


FLOOD = """
import socket, struct, sys
left = int(sys.argv[2])
while left:
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # leaves no port in TIME_WAIT
        try:
            one.connect(("127.0.0.1", int(sys.argv[1])))
            left -= 1
        except ConnectionRefusedError:  # the run has not begun
            continue
"""
CONNECTS = 10_000


def test_strangers_who_connect_quickly_before_during_and_after_the_start_do_not_end_the_run(
    lines, shells, tmp_path: Path
) -> None:
    """The supervisor's event loop must run between two connections, also while it expects no node."""
    wait = f"until [ -e {tmp_path}/flooded ]; do sleep 0.1; done"
    made = lines({"nodes": 2, "command": ["sh", "-c", wait]}, *HERE)
    port = after("--port", made[0])
    floods = [subprocess.Popen([sys.executable, "-c", FLOOD, port, str(CONNECTS)]) for _ in range(2)]
    try:
        for node in (0, 1):
            shells.paste(made[node])
        run = begun(tmp_path / "runs")
        assert [flood.wait(90) for flood in floods] == [0, 0]
        (tmp_path / "flooded").touch()
        codes, said = shells.end()
    finally:
        for flood in floods:
            flood.kill()
            flood.wait()
    assert codes == [0, 0], said
    assert "Traceback" not in "".join(said)
    assert "no node is expected" in said[0]
    assert [row["code"] for row in read_lines(run.attempts)] == [0]
    assert not [row for row in read_lines(run.events) if "did not run for" in str(row.get("text"))]
