"""The same job over every transport, on four nodes of a box: real sshd, real pdsh, real Slurm."""

import functools
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from muster.jobs.basics.files import read_lines
from muster.jobs.runfolder.rundir import RunDir, list_runs
from muster.launch.common.processes import of_run
from support.box import LiveBox
from support.live import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

TRAINING = """
name: nano
nodes: 4
train: {model: gpt-nano, data: synthetic, mode: allreduce, batch_size: 8, steps: 3, log_every: 1, evaluate: false}
"""
HELLO = "name: hello\nnodes: 4\nbench: {operation: hello}\n"
SLEEP = "name: sleep\nnodes: 4\ngrace_s: 1\ncommand: [sleep, '1000']\n"
DUMP = """
import json, os, sys
with open(os.path.join(os.environ["DUMPS"], os.environ["RANK"] + ".json"), "w") as file:
    json.dump({"argv": sys.argv[1:], "env": dict(os.environ)}, file)
"""


class Muster:
    """The command, as a user of the box types it, with a folder of runs of its own."""

    def __init__(self, box: LiveBox, folder: Path) -> None:
        self.box = box
        self.folder = folder
        self.runs = folder / "runs"
        self.left: list[subprocess.Popen[str]] = []

    def start(self, *words: str, job: str | None = None, **more: Any) -> subprocess.Popen[str]:
        if job is not None:
            (self.folder / "job.yaml").write_text(job)
        argv = [sys.executable, "-m", "muster", *words, "--runs", str(self.runs)]
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more)
        self.left.append(process)
        return process

    def call(self, *words: str, job: str | None = None) -> tuple[int, str, str]:
        process = self.start(*words, job=job)
        out, err = process.communicate(timeout=120)
        return process.returncode, out, err

    def job(self) -> str:
        return str(self.folder / "job.yaml")

    def newest(self) -> RunDir:
        wait_until(lambda: list_runs(self.runs), "a run")
        return list_runs(self.runs)[-1]

    def wait_for(self, event: str, count: int = 1) -> None:
        run = self.newest()
        wait_until(lambda: sum(row["event"] == event for row in read_lines(run.events)) >= count, f"{count} x {event}")

    def verdict(self) -> dict[str, Any]:
        return list(read_lines(self.newest().attempts))[-1]


@pytest.fixture
def muster(box: LiveBox, tmp_path: Path) -> Iterator[Muster]:
    made = Muster(box, tmp_path)
    yield made
    for process in made.left:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=60)


def local(muster: Muster, job: str) -> tuple[int, str]:
    code, _, err = muster.call("run", muster.job(), job=job)
    return code, err


def over(transport: str) -> Callable[[Muster, str], tuple[int, str]]:
    def run(muster: Muster, job: str) -> tuple[int, str]:
        code, _, err = muster.call("run", muster.job(), "--hosts", muster.box.spelt, "--on", transport, job=job)
        return code, err

    return run


def by_hand(muster: Muster, job: str) -> tuple[int, str]:
    """Paste the lines into shells on the four nodes, node 0's last but one."""
    code, out, err = muster.call("cmd", muster.job(), "--hosts", muster.box.spelt, job=job)
    assert code == 0, err
    lines = [line for line in out.splitlines() if not line.startswith("#")]  # above each: which node it is for
    shells = {}
    for node in (2, 1, 0, 3):
        shells[node] = subprocess.Popen(
            muster.box.argv(f"node{node}", ["bash", "-c", lines[node]]),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    said = {node: shell.communicate(timeout=120)[0] for node, shell in shells.items()}
    codes = {shell.returncode for shell in shells.values()}
    return (codes.pop() if len(codes) == 1 else 1), str(said)


def submitit(muster: Muster, job: str) -> tuple[int, str]:
    words = ("--on", "submitit", "--executor", "slurm", "--hosts", muster.box.spelt)
    code, _, err = muster.call("run", muster.job(), *words, job=job)
    return code, err


TRANSPORTS = {
    "local": local,
    "ssh": over("ssh"),
    "pdsh": over("pdsh"),
    "by hand": by_hand,
    "slurm": over("slurm"),
    "submitit": submitit,
}
soaked = functools.partial(pytest.param, marks=pytest.mark.soak)
REMOTE = [name for name in TRANSPORTS if name != "local"]


@pytest.fixture(scope="session")
def losses_on_one_machine(tmp_path_factory: pytest.TempPathFactory, box: LiveBox) -> list[float]:
    muster = Muster(box, tmp_path_factory.mktemp("local"))
    code, said = local(muster, TRAINING)
    assert code == 0, said
    return losses(muster)


def losses(muster: Muster) -> list[float]:
    return [row["loss"] for row in read_lines(muster.newest().metrics) if "step_s" in row]


def took_the_interface_between_the_nodes_and_left_nothing(muster: Muster) -> bool:
    attempt = muster.newest().attempt(0)
    commands = [json.loads(attempt.command(node).read_text()) for node in range(4)]
    taken = {command["warm"]["env"]["GLOO_SOCKET_IFNAME"] for command in commands}
    return taken == {"eth1"} and not of_run(muster.newest().run_id)


@pytest.mark.parametrize("transport", REMOTE)
def test_training_gives_the_same_bits_over_every_transport(transport, muster, losses_on_one_machine) -> None:
    code, said = TRANSPORTS[transport](muster, TRAINING)
    assert code == 0, said
    assert len(losses_on_one_machine) == 3
    assert losses(muster) == losses_on_one_machine
    placed = json.loads(muster.newest().attempt(0).placement.read_text())["nodes"]
    assert [node["host"] for node in placed] == [f"node{node}" for node in range(4)]
    assert took_the_interface_between_the_nodes_and_left_nothing(muster)


WORDS = st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\0"), max_size=12) | st.sampled_from(
    [
        "",
        " ",
        "a b",
        "it's",
        '"',
        "line\nline",
        "%h %n %%",
        "$(id) `id` $HOME",
        "; rm x",
        "a,b=c",
        "größe 🚀",
        "\\",
        "-x",
    ]
)


# test_ssh_transport.py does this over ssh and pdsh too, with harder words and more examples.
@pytest.mark.parametrize("transport", [soaked(name) if name in {"ssh", "pdsh"} else name for name in REMOTE])
@settings(max_examples=2, deadline=None, suppress_health_check=list(HealthCheck))
@given(words=st.lists(WORDS, min_size=1, max_size=8))
def test_arguments_and_variables_survive_byte_for_byte(transport, muster, tmp_path, words: list[str]) -> None:
    dumps = tmp_path / "dumps"
    dumps.mkdir(exist_ok=True)
    words = [*words, "a b", "it's", 'a "quote"', "line one\nline two", "%h", "$(id)", ";", "a,b", "größe", ""]
    env = {"DUMPS": str(dumps), **{f"VALUE_{number}": word for number, word in enumerate(words)}}
    setup = ["export PATH=/set/up:$PATH LEFT='by the lines'", "unset HOME"]
    job = {"nodes": 4, "env": env, "setup": setup, "command": [sys.executable, "-c", DUMP, *words]}
    code, said = TRANSPORTS[transport](muster, json.dumps(job))
    assert code == 0, said
    for rank in range(4):
        seen = json.loads((dumps / f"{rank}.json").read_text())
        assert seen["argv"] == words
        assert {name: seen["env"][name] for name in env} == env
        assert seen["env"]["PATH"].startswith("/set/up:")
        assert (seen["env"]["LEFT"], "HOME" in seen["env"]) == ("by the lines", False)
        (dumps / f"{rank}.json").unlink()


# Bad nodes and lost ones ----------------------------------------------------------------------------------------------


# To the supervisor a killed node is a closed connection, as a killed agent is: see test_run_stopping.py.
@pytest.mark.parametrize(
    ("how", "transport"),
    [("power", "ssh"), soaked("kill", "ssh"), ("unplug", "ssh"), ("freeze", "ssh"), ("power", "pdsh")],
)
def test_a_lost_node_is_named_and_nothing_is_left(how, transport, muster) -> None:
    box = muster.box
    process = muster.start("run", muster.job(), "--hosts", box.spelt, "--on", transport, job=SLEEP)
    muster.wait_for("started", 4)
    run = muster.newest()
    box.fail("node2", how)
    try:
        _, err = process.communicate(timeout=60)
        assert process.returncode == 69, err
        assert muster.verdict()["first"]["host"] == "node2"
        assert muster.verdict()["class"] == "unreachable"
        if how != "freeze":  # a frozen process cannot act before it is thawed
            wait_until(lambda: not of_run(run.run_id), "the end of the cut node's ranks")
    finally:
        box.heal("node2")
    wait_until(lambda: not of_run(run.run_id), "the end of all ranks")


def test_without_the_bad_node_a_smaller_job_runs(muster) -> None:
    words = ("--hosts", muster.box.spelt, "--exclude", "node1", "-N", "3")
    code, _, err = muster.call("run", muster.job(), *words, job=HELLO)
    assert code == 0, err
    assert [node["host"] for node in json.loads(muster.newest().attempt(0).placement.read_text())["nodes"]] == [
        *("node0", "node2", "node3")
    ]


# Detached -------------------------------------------------------------------------------------------------------------


def test_a_submitted_run_is_seen_and_stopped_from_another_machine(muster) -> None:
    code, out, err = muster.call(
        "submit", muster.job(), "--hosts", muster.box.spelt, "--on", "ssh", "--parsable", job=SLEEP
    )
    assert code == 0, err
    run_id = out.strip()
    muster.wait_for("started", 4)
    argv = [sys.executable, "-m", "muster"]
    seen = muster.box.exec("node3", [*argv, "status", run_id, "--json", "--runs", str(muster.runs)])
    state = json.loads(seen.stdout)
    assert (state["state"], state["sure"]) == ("running", True)  # by its lease: node3 cannot see the process
    stopped = muster.box.exec("node3", [*argv, "stop", run_id, "--runs", str(muster.runs)])
    assert stopped.returncode == 0, stopped.stderr
    assert muster.verdict()["class"] == "stopped"
    assert not of_run(run_id)


def test_a_submitted_run_uses_the_code_as_it_was_then(muster, tmp_path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "program.py").write_text("import time\ntime.sleep(1)\nimport other\nprint(other.WORD)\n")
    (work / "other.py").write_text("WORD = 'then'\n")
    job = f"nodes: 4\nworkdir: {work}\ncommand: [{sys.executable}, program.py]\n"
    code, _, err = muster.call("submit", muster.job(), "--hosts", muster.box.spelt, "--on", "ssh", job=job)
    assert code == 0, err
    (work / "other.py").write_text("WORD = 'later'\n")
    muster.wait_for("ended")
    assert [muster.newest().attempt(0).out(rank).read_text() for rank in range(4)] == ["then\n"] * 4


# Storage --------------------------------------------------------------------------------------------------------------


def test_without_shared_storage_logs_and_metrics_come_home(apart_box: LiveBox, tmp_path, losses_on_one_machine) -> None:
    muster = Muster(apart_box, tmp_path)
    assert apart_box.runs is not None
    muster.runs = apart_box.runs
    code, _, err = muster.call("run", muster.job(), "--hosts", apart_box.spelt, "--on", "ssh", job=TRAINING)
    assert code == 0, err
    assert err.count("failover across nodes is off") == 1
    assert losses(muster) == losses_on_one_machine
    attempt = muster.newest().attempt(0)
    for rank in range(4):
        assert len(list(read_lines(attempt.metrics(rank)))) == 3
        assert attempt.node(rank).is_file()
    assert "step 3/3" in attempt.out(0).read_text()
