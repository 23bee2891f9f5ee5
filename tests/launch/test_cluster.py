"""The same job over every transport, on four nodes of a box: real sshd, real pdsh, real Slurm."""

import json
import subprocess
import sys
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from muster.jobs.basics.files import read_lines
from muster.jobs.spec.load import EXAMPLES
from muster.launch.cli import main
from muster.launch.common.processes import of_run
from support.box import BoxUser, LiveBox, ended
from support.live import wait_until
from support.soak import only_some

pytestmark = [pytest.mark.command, pytest.mark.cluster, pytest.mark.timeout(180)]

NODES = 3  # the fewest whose sums depend on their order
TRAINING = f"""
name: nano
nodes: {NODES}
threads_per_rank: 1
train: {{model: gpt-nano, data: synthetic, mode: allreduce, batch_size: 6, steps: 3, log_every: 1, evaluate: false}}
"""
HELLO = "name: hello\nnodes: 4\nbench: {operation: hello}\n"
SLEEP = "name: sleep\nnodes: 4\ngrace_s: 1\ncommand: [sleep, '1000']\n"
DUMP = """
import json, os, sys
with open(os.path.join(os.environ["DUMPS"], os.environ["RANK"] + ".json"), "w") as file:
    json.dump({"argv": sys.argv[1:], "env": dict(os.environ)}, file)
"""


def over(*transport: str) -> Callable[[BoxUser, str], tuple[int, str]]:
    def run(user: BoxUser, job: str) -> tuple[int, str]:
        code, _, err = ended(user.start("run", job, "--on", *transport))
        return code, err

    return run


def by_hand(user: BoxUser, job: str) -> tuple[int, str]:
    """Paste the lines into shells on the nodes, node 0's after those of nodes 2 and 1."""
    code, out, err = ended(user.start("cmd", job))
    assert code == 0, err
    lines = [line for line in out.splitlines() if not line.startswith("#")]  # above each: which node it is for
    shells = {}
    for node in (2, 1, 0, 3)[: len(lines)]:
        shells[node] = subprocess.Popen(
            user.box.argv(f"node{node}", ["bash", "-c", lines[node]]),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    said = {node: shell.communicate(timeout=120)[0] for node, shell in shells.items()}
    codes = {shell.returncode for shell in shells.values()}
    return (codes.pop() if len(codes) == 1 else 1), str(said)


TRANSPORTS = {
    "ssh": over("ssh"),
    "pdsh": over("pdsh"),
    "by hand": by_hand,
    "slurm": over("slurm"),
    "submitit": over("submitit"),
}
REMOTE = list(TRANSPORTS)


@pytest.fixture(scope="module")
def losses_on_one_machine(tmp_path_factory: pytest.TempPathFactory, box: LiveBox, forked_ranks: None) -> list[float]:
    user = BoxUser(box, tmp_path_factory.mktemp("local"))
    (user.folder / "job.yaml").write_text(TRAINING)
    assert main(["run", str(user.folder / "job.yaml"), "--runs", str(user.runs)]) == 0
    return losses(user)


def losses(user: BoxUser) -> list[float]:
    return [row["loss"] for row in read_lines(user.run.metrics) if "step_s" in row]


def took_the_interface_between_the_nodes_and_left_nothing(user: BoxUser) -> bool:
    attempt = user.run.attempt(0)
    commands = [json.loads(attempt.command(node).read_text()) for node in range(NODES)]
    taken = {command["warm"]["env"]["GLOO_SOCKET_IFNAME"] for command in commands}
    return taken == {"eth1"} and not of_run(user.run.run_id)


@pytest.mark.parametrize("transport", REMOTE)
def test_training_gives_the_same_bits_over_every_transport(transport, user, losses_on_one_machine) -> None:
    code, said = TRANSPORTS[transport](user, TRAINING)
    assert code == 0, said
    assert len(losses_on_one_machine) == 3
    assert losses(user) == losses_on_one_machine
    placed = json.loads(user.run.attempt(0).placement.read_text())["nodes"]
    assert [node["host"] for node in placed] == [f"node{node}" for node in range(NODES)]
    assert took_the_interface_between_the_nodes_and_left_nothing(user)


HARD = ["", " ", "a b", "it's", '"', "line\nline", "%h %n %%", "$(id) `id` $HOME", "; rm x", "a,b=c", "größe 🚀", "-x"]
WORDS = st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\0"), max_size=12)
WORDS |= st.sampled_from([*HARD, "\\"])


# test_ssh_transport.py does this over ssh and pdsh too, with harder words and more examples.
@pytest.mark.parametrize("transport", only_some(REMOTE, ["by hand", "slurm"]))
@settings(max_examples=1, deadline=None, suppress_health_check=list(HealthCheck))
@given(words=st.lists(WORDS, min_size=4, max_size=12).filter(any))  # the first draw has empty words only
def test_arguments_and_variables_survive_byte_for_byte(transport, user, tmp_path, words: list[str]) -> None:
    dumps = tmp_path / "dumps"
    dumps.mkdir(exist_ok=True)
    words = [*words, "a b", "it's", 'a "quote"', "line one\nline two", "%h", "$(id)", ";", "a,b", "größe", ""]
    env = {"DUMPS": str(dumps), **{f"VALUE_{number}": word for number, word in enumerate(words)}}
    setup = ["export PATH=/set/up:$PATH LEFT='by the lines'", "unset HOME"]
    job = {"nodes": 4, "env": env, "setup": setup, "command": [sys.executable, "-c", DUMP, *words]}
    code, said = TRANSPORTS[transport](user, json.dumps(job))
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
    only_some(
        [("power", "ssh"), ("kill", "ssh"), ("unplug", "ssh"), ("freeze", "ssh"), ("power", "pdsh")],
        [("power", "ssh"), ("unplug", "ssh"), ("freeze", "ssh")],
    ),
)
def test_a_lost_node_is_named_and_nothing_is_left(how, transport, user) -> None:
    box = user.box
    process = user.start("run", SLEEP, "--on", transport)
    user.wait_for("started", 4)
    run = user.run
    box.fail("node2", how)
    try:
        _, err = process.communicate(timeout=60)
        assert process.returncode == 69, err
        assert user.verdict()["first"]["host"] == "node2"
        assert user.verdict()["class"] == "unreachable"
        if how != "freeze":  # a frozen process cannot act before it is thawed
            wait_until(lambda: not of_run(run.run_id), "the end of the cut node's ranks")
    finally:
        box.heal("node2")
    wait_until(lambda: not of_run(run.run_id), "the end of all ranks")


def test_without_the_bad_node_a_smaller_job_runs(user) -> None:
    code, _, err = ended(user.start("run", HELLO, "--exclude", "node1", "-N", "3"))
    assert code == 0, err
    assert [node["host"] for node in json.loads(user.run.attempt(0).placement.read_text())["nodes"]] == [
        *("node0", "node2", "node3")
    ]


# Detached -------------------------------------------------------------------------------------------------------------


def test_a_submitted_run_is_seen_and_stopped_from_another_machine(user) -> None:
    code, out, err = ended(user.start("submit", SLEEP, "--on", "ssh", "--parsable"))
    assert code == 0, err
    run_id = out.strip()
    user.wait_for("started", 4)
    argv = [sys.executable, "-m", "muster"]
    seen = user.box.exec("node3", [*argv, "status", run_id, "--json", "--runs", str(user.runs)])
    state = json.loads(seen.stdout)
    assert (state["state"], state["sure"]) == ("running", True)  # by its lease: node3 cannot see the process
    stopped = user.box.exec("node3", [*argv, "stop", run_id, "--runs", str(user.runs)])
    assert stopped.returncode == 0, stopped.stderr
    assert user.verdict()["class"] == "stopped"
    assert not of_run(run_id)


def test_a_submitted_run_uses_the_code_as_it_was_then(user, tmp_path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "program.py").write_text("import time\ntime.sleep(1)\nimport other\nprint(other.WORD)\n")
    (work / "other.py").write_text("WORD = 'then'\n")
    job = f"nodes: 4\nworkdir: {work}\ncommand: [{sys.executable}, program.py]\n"
    code, _, err = ended(user.start("submit", job, "--on", "ssh"))
    assert code == 0, err
    (work / "other.py").write_text("WORD = 'later'\n")
    user.wait_for("ended")
    assert [user.run.attempt(0).out(rank).read_text() for rank in range(4)] == ["then\n"] * 4


# Storage --------------------------------------------------------------------------------------------------------------


def test_without_shared_storage_logs_and_metrics_come_home(apart_box: LiveBox, tmp_path, losses_on_one_machine) -> None:
    user = BoxUser(apart_box, tmp_path)
    assert apart_box.runs is not None
    user.runs = apart_box.runs
    code, _, err = ended(user.start("run", TRAINING, "--on", "ssh"))
    assert code == 0, err
    assert err.count("failover across nodes is off") == 1
    assert losses(user) == losses_on_one_machine
    attempt = user.run.attempt(0)
    for rank in range(NODES):
        assert len(list(read_lines(attempt.metrics(rank)))) == 3
        assert attempt.node(rank).is_file()
    assert "step 3/3" in attempt.out(0).read_text()


def test_a_class_of_the_users_is_checked_across_nodes_and_the_table_comes_home(apart_box: LiveBox, tmp_path) -> None:
    user = BoxUser(apart_box, tmp_path)
    assert apart_box.runs is not None
    user.runs = apart_box.runs
    own = ("--with", "my_ddp.py:MyDDP", "--set", f"workdir={EXAMPLES / 'own'}", "--steps", "1", "--json")
    code, out, err = ended(user.start("verify", TRAINING, "--on", "ssh", "-N", "2", *own))
    assert code == 0, err
    record = json.loads(out)
    assert (record["pass"], record["kind"], record["world_size"]) == (True, "wrapper", 2)
