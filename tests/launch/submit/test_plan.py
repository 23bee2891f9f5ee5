"""The plan of an attempt, as pure functions and as `muster plan` prints it: the whole text against a golden file."""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.errors import RefusedError
from jobs.placement import Host, place
from jobs.ranks import RankEnv, read
from jobs.rundir import RunDir
from jobs.site import Site
from jobs.spec import CommandSettings, Job
from launch import cli
from launch.submit.plan import (
    Context,
    Machine,
    NodePlan,
    RankPlan,
    plan_nodes,
    preload,
    shared_environment,
    start_message,
)

GOLDEN = Path(__file__).parent / "golden"


def make_context(
    *, site: Site | None = None, entry: str | None = None, address: str = "127.0.0.1", **keys: Any
) -> Context:
    settings = CommandSettings(argv=["program", "--flag", "a b"])
    job = Job(**{"name": "demo", "kind": "command", "settings": settings, **keys})
    placement = place(job, [Host("box", address)] * job.nodes)
    run = RunDir(Path("/runs/demo-20250101T000000Z-abc123"))
    return Context(job, site or Site(), placement, run, "/srv/job", "/opt/muster/bin/python", entry)


def box(cores: int, *gpus: str, host: str = "box") -> Machine:
    return Machine(host, tuple(range(cores)), gpus)


def plan(context: Context, machine: Machine, port: int | None = 4242) -> list[NodePlan]:
    return plan_nodes(context, [machine] * len(context.placement.nodes), port)


def values(rank: RankPlan) -> dict[str, str]:
    return {each.name: each.value for each in rank.environment}


def shared(
    context: Context, environ: dict[str, str] | None = None, threads: int = 1, interface: str = ""
) -> dict[str, tuple[str, str]]:
    machine = replace(box(1), environ=environ or {}, interface=interface)
    return {each.name: (each.value, each.origin) for each in shared_environment(context, machine, threads)}


# Cores, GPUs and threads ----------------------------------------------------------------------------------------------


@given(nodes=st.integers(1, 6), ranks=st.integers(1, 4), cores=st.integers(1, 40), gpus=st.integers(0, 9))
def test_pretend_nodes_share_their_host_without_overlap_when_there_is_enough(nodes, ranks, cores, gpus) -> None:
    names = tuple(f"GPU-{number}" for number in range(gpus))
    plans = plan(make_context(nodes=nodes, ranks_per_node=ranks), box(cores, *names))
    assert [rank.rank for node in plans for rank in node.ranks] == list(range(nodes * ranks))
    of_nodes = [{core for rank in node.ranks for core in rank.cores} for node in plans]
    assert all(rank.cores for node in plans for rank in node.ranks)
    assert set().union(*of_nodes) == set(range(cores))
    if cores >= nodes:
        assert sum(map(len, of_nodes)) == cores
    if cores >= nodes * ranks:
        assert sum(len(rank.cores) for node in plans for rank in node.ranks) == cores
    of_nodes_gpus = [node.ranks[0].gpus for node in plans]
    assert all(rank.gpus == node.ranks[0].gpus for node in plans for rank in node.ranks)
    if gpus >= nodes:
        assert sorted(name for each in of_nodes_gpus for name in each) == sorted(names)
    elif gpus:
        assert all(len(each) == 1 for each in of_nodes_gpus)


def test_nodes_on_different_hosts_keep_all_they_have() -> None:
    machines = [box(4, "0", "1", host="n0"), box(2, "0", host="n1")]
    plans = plan_nodes(make_context(nodes=2), machines, 4242)
    assert [node.ranks[0].cores for node in plans] == [(0, 1, 2, 3), (0, 1)]
    assert [node.ranks[0].gpus for node in plans] == [("0", "1"), ("0",)]
    assert "CUDA_VISIBLE_DEVICES" not in values(plans[0].ranks[0])


def test_cuda_visible_devices_is_set_only_where_pretend_nodes_divide_gpus() -> None:
    divided = plan(make_context(nodes=2, ranks_per_node=2), box(4, "0", "1", "7"))
    assert [[values(rank)["CUDA_VISIBLE_DEVICES"] for rank in node.ranks] for node in divided] == [
        ["0,1"] * 2,
        ["7"] * 2,
    ]
    for context, machine in (
        (make_context(nodes=2), box(4)),  # no GPUs
        (make_context(nodes=1, ranks_per_node=2), box(4, "0", "1")),  # one node has them all
        (make_context(nodes=2), box(4, "0")),  # one GPU that both use
    ):
        assert all("CUDA_VISIBLE_DEVICES" not in values(rank) for node in plan(context, machine) for rank in node.ranks)


def test_threads_are_the_jobs_number_or_on_request_the_cores_of_a_rank() -> None:
    def threads(**keys: Any) -> list[int]:
        return [
            rank.threads
            for node in plan(make_context(nodes=2, ranks_per_node=2, **keys), box(8))
            for rank in node.ranks
        ]

    assert threads() == [1] * 4
    assert threads(threads_per_rank=3) == [3] * 4
    assert threads(threads_per_rank="auto") == [2] * 4
    (crowded,) = plan(make_context(ranks_per_node=4, threads_per_rank="auto"), box(2))
    assert [rank.threads for rank in crowded.ranks] == [1] * 4
    assert {each.value for each in crowded.warm_environment if each.name == "OMP_NUM_THREADS"} == {"1"}


# Environment ----------------------------------------------------------------------------------------------------------


def test_a_ranks_variables_are_what_a_rank_reads_back() -> None:
    plans = plan(make_context(nodes=2, ranks_per_node=2), box(4))
    for node in plans:
        for rank in node.ranks:
            assert read(values(rank)) == RankEnv(
                rank=rank.rank,
                world_size=4,
                local_rank=rank.rank % 2,
                local_world_size=2,
                node_rank=node.placement.node_rank,
                nodes=2,
                master_addr="127.0.0.1",
                master_port=4242,
                run_id="demo-20250101T000000Z-abc123",
                run_dir="/runs/demo-20250101T000000Z-abc123",
                agent_store=True,
            )


def test_without_torch_no_store_is_promised_and_without_a_port_none_is_made_up() -> None:
    (node,) = plan(make_context(), replace(box(2), torch=False), None)
    assert values(node.ranks[0])["TORCHELASTIC_USE_AGENT_STORE"] == "False"
    assert values(node.ranks[0])["MASTER_PORT"] == ""


NAMES = [*RankEnv(0, 1, 0, 1, 0, 1, "", 0, run_id="-", run_dir="-").variables(), "MUSTER_STATUS_FD"]


@pytest.mark.parametrize("name", NAMES)
def test_a_rank_variable_in_the_job_or_site_file_is_refused_with_its_name(name: str) -> None:
    for context, file in (
        (make_context(env={name: "1"}), "job file"),
        (make_context(site=Site(env={name: "1"})), "site file"),
    ):
        with pytest.raises(RefusedError) as caught:
            shared_environment(context, box(1), 1)
        assert str(caught.value) == f"{file}: env.{name}: this is Muster's to set for each rank; remove it"
        assert caught.value.exit_code == 78


def test_the_job_wins_over_the_site_and_the_site_over_our_defaults() -> None:
    site = Site(env={"OMP_NUM_THREADS": "2", "PYTHONUNBUFFERED": "", "ONLY_SITE": "s", "BOTH": "site"})
    found = shared(make_context(site=site, env={"OMP_NUM_THREADS": "5", "BOTH": "job"}), threads=1)
    assert found == {
        "MUSTER_RUN_ID": ("demo-20250101T000000Z-abc123", "the run"),
        "OMP_NUM_THREADS": ("5", "job file: env"),
        "PATH": ("/opt/muster/bin", "the interpreter's folder first, so that python is Muster's own"),
        "PYTHONUNBUFFERED": ("", "site file: env"),
        "GLOO_SOCKET_IFNAME": ("lo", "all ranks are on this machine"),
        "ONLY_SITE": ("s", "site file: env"),
        "BOTH": ("job", "job file: env"),
    }
    assert shared(make_context(), threads=3)["OMP_NUM_THREADS"] == ("3", "threads_per_rank: 1")


def test_on_one_host_gloo_meets_on_loopback_and_nccl_is_left_alone() -> None:
    for interface in ("", "lo", "eth1"):
        found = shared(make_context(), interface=interface)
        assert found["GLOO_SOCKET_IFNAME"] == ("lo", "all ranks are on this machine")
        assert "NCCL_SOCKET_IFNAME" not in found


def test_on_several_hosts_both_use_the_interface_that_leads_to_the_master() -> None:
    found = shared(make_context(address="10.10.1.1"), interface="eth1")
    origin = "the way to the master 10.10.1.1"
    assert found["GLOO_SOCKET_IFNAME"] == ("eth1", origin)
    assert found["NCCL_SOCKET_IFNAME"] == ("=eth1", origin)  # = means this one, and none that begins alike
    unknown = shared(make_context(address="10.10.1.1"))
    assert not {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"} & unknown.keys()


@pytest.mark.parametrize("name", ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"])
def test_an_interface_that_the_user_named_stays(name: str) -> None:
    for address, interface in (("127.0.0.1", ""), ("10.10.1.1", "eth1")):
        context = make_context(address=address)
        assert name not in shared(context, {name: "eth7"}, interface=interface)  # a node's own environment has it
        for keys in ({"env": {name: "eth8"}}, {"site": Site(env={name: "eth8"})}):
            given = shared(make_context(address=address, **keys), {name: "eth7"}, interface=interface)
            assert given[name][0] == "eth8"


def test_each_node_has_the_interface_that_it_told_itself() -> None:
    machines = [replace(box(2, host=f"n{node}"), interface=f"eth{node}") for node in range(2)]
    plans = plan_nodes(make_context(nodes=2, address="10.10.1.1"), machines, 4242)
    found = [{each.name: each.value for each in node.warm_environment} for node in plans]
    assert [each["GLOO_SOCKET_IFNAME"] for each in found] == ["eth0", "eth1"]


def test_the_path_is_that_of_the_node_behind_the_interpreters_folder() -> None:
    assert shared(make_context(), {"PATH": "/usr/bin:/bin"})["PATH"][0] == "/opt/muster/bin:/usr/bin:/bin"
    machines = [replace(box(1, host=name), environ={"PATH": f"/{name}/bin"}) for name in ("n0", "n1")]
    plans = plan_nodes(make_context(nodes=2, address="10.10.1.1"), machines, 4242)
    paths = [each.value for node in plans for each in node.warm_environment if each.name == "PATH"]
    assert paths == ["/opt/muster/bin:/n0/bin", "/opt/muster/bin:/n1/bin"]


def test_a_node_that_keeps_its_part_of_the_run_elsewhere_is_told_so_and_its_ranks_too() -> None:
    elsewhere = RunDir(Path("/tmp/muster-0/demo-20250101T000000Z-abc123"))
    machines = [box(2, host="n0"), replace(box(2, host="n1"), run=elsewhere)]
    context = make_context(nodes=2, address="10.10.1.1")
    first, second = plan_nodes(context, machines, 4242)
    assert (first.run, first.apart, second.run, second.apart) == (context.run, False, elsewhere, True)
    assert values(first.ranks[0])["MUSTER_RUN_DIR"] == str(context.run.path)
    assert values(second.ranks[0])["MUSTER_RUN_DIR"] == str(elsewhere.path)
    message = start_message(context, second, store=True, master_port=4242)
    assert (message["apart"], message["attempt_dir"]) == (True, f"{elsewhere.path}/attempt-000")
    assert message["ranks"][0]["out"] == f"{elsewhere.path}/attempt-000/rank-00001.out"


def test_every_value_has_an_origin() -> None:
    site = Site(env={"A": "1"})
    for node in plan(make_context(nodes=2, site=site, env={"B": "2"}), box(4, "0", "1")):
        for each in (*node.warm_environment, *(value for rank in node.ranks for value in rank.environment)):
            assert each.origin, each.name


# The start message ----------------------------------------------------------------------------------------------------


def test_a_command_is_started_by_its_argv_and_nothing_is_imported_for_it() -> None:
    context = make_context(nodes=2, ranks_per_node=2, setup=["module load x"], site=Site(setup=["umask 027"]))
    message = start_message(context, plan(context, box(4))[1], store=True, master_port=4242)
    assert json.loads(json.dumps(message)) == message
    ranks = message.pop("ranks")
    attempt = "/runs/demo-20250101T000000Z-abc123/attempt-000"
    assert message == {
        "do": "start",
        "attempt": 0,
        "node": 1,
        "attempt_dir": attempt,
        "apart": False,
        "workdir": "/srv/job",
        "setup": ["umask 027", "module load x"],
        "store": True,
        "master_port": 4242,
        "warm": {
            "preload": "",
            "env": {
                "MUSTER_RUN_ID": "demo-20250101T000000Z-abc123",
                "OMP_NUM_THREADS": "1",
                "PYTHONUNBUFFERED": "1",
                "PATH": "/opt/muster/bin",
                "GLOO_SOCKET_IFNAME": "lo",
            },
        },
        "console": [],
    }
    assert [rank["rank"] for rank in ranks] == [2, 3]
    env = ranks[1].pop("env")
    assert (env["RANK"], env["LOCAL_RANK"], env["MASTER_PORT"]) == ("3", "1", "4242")
    assert ranks[1] == {
        "rank": 3,
        "workdir": "/srv/job",
        "out": f"{attempt}/rank-00003.out",
        "err": f"{attempt}/rank-00003.err",
        "cores": [3],
        "gpus": [],
        "threads": 1,
        "argv": ["program", "--flag", "a b"],
    }


def test_a_function_is_called_with_the_job_and_the_commands_options() -> None:
    context = replace(make_context(entry="jobs.train.main:run_rank", nodes=1), options={"steps": 3})
    message = start_message(context, plan(context, box(2))[0], store=True, master_port=1)
    (rank,) = message["ranks"]
    assert "argv" not in rank
    assert rank["call"] == "jobs.train.main:run_rank"
    job = {"name": "demo", "kind": "command", "nodes": 1, "settings": {"argv": ["program", "--flag", "a b"]}}
    assert rank["payload"] == {"job": job, "steps": 3}
    assert message["console"] == [0]
    assert message["warm"]["preload"] == preload(context) == "torch,torch.distributed,jobs.train.main"


# `muster plan` --------------------------------------------------------------------------------------------------------

SITE = """\
env: {NCCL_DEBUG: WARN, SHARED: site}
setup: [module load python]
"""
COMMAND = """\
name: demo
nodes: 2
ranks_per_node: 2
workdir: /srv/work
env: {SHARED: job, TEXT: "a b$c"}
setup: ["echo 'two words'"]
command: [python3, train.py, --name, "it's"]
"""
TRAIN = """\
name: tiny
nodes: 2
workdir: /srv/work
threads_per_rank: auto
train: {model: gpt-nano, data: synthetic, steps: 2}
"""


@pytest.fixture
def muster_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """Return a function that plans a job on a fixed machine: (exit code, standard output)."""
    machine = replace(box(6, "0", "1", host="box"), environ=os.environ)
    monkeypatch.setattr("launch.submit.prepare.this_machine", lambda: machine)
    monkeypatch.setattr("launch.submit.prepare.check_files", lambda job, environ: None)  # /srv/work is not there
    monkeypatch.setattr(sys, "executable", "/opt/muster/bin/python")
    monkeypatch.setattr("jobs.boot.CODE_ROOT", Path("/opt/muster/code"))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    for name in ("GLOO_SOCKET_IFNAME", "MUSTER_SITE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "job.yaml").write_text(COMMAND)
    (tmp_path / "site.yaml").write_text(SITE)

    def run(text: str, *options: str) -> tuple[int, str]:
        (tmp_path / "job.yaml").write_text(text)
        files = [str(tmp_path / "job.yaml"), "--site", str(tmp_path / "site.yaml"), "--runs", "/srv/runs"]
        code = cli.main(["plan", *files, *options])
        return code, capsys.readouterr().out

    return run


@pytest.mark.parametrize(
    ("name", "text", "options"),
    [
        ("plan-command.txt", COMMAND, []),
        ("plan-train.txt", TRAIN, []),
        ("plan-ssh.txt", COMMAND, ["-w", "n[0-3]", "-e", "n1", "--on", "ssh", "--jump", "gate", "--login", "alice"]),
    ],
)
def test_the_whole_text_of_a_plan_is_the_golden_one(name: str, text: str, options: list[str], muster_plan) -> None:
    code, out = muster_plan(text, *options)
    assert code == 0
    assert out == (GOLDEN / name).read_text(encoding="utf-8")


def test_json_holds_the_same_plan_as_records_and_null_where_the_start_decides(muster_plan) -> None:
    code, out = muster_plan(COMMAND, "--json")
    record = json.loads(out)
    assert code == 0
    assert list(record) == [
        *("name", "kind", "transport", "start", "world_size"),
        *("workdir", "runs", "setup", "nodes", "command", "function"),
    ]
    assert (record["name"], record["kind"], record["transport"], record["world_size"]) == (
        "demo",
        "command",
        "local",
        4,
    )
    assert (record["workdir"], record["runs"]) == ("/srv/work", "/srv/runs")
    assert record["setup"] == ["module load python", "echo 'two words'"]
    assert (record["command"], record["function"]) == (["python3", "train.py", "--name", "it's"], None)
    node = record["nodes"][1]
    assert list(node) == ["node", "host", "address", "environment", "ranks"]
    agent = ["/opt/muster/bin/python", "-I", "/opt/muster/code/launch/boot.py", "launch.agent", "--node"]
    assert record["start"] == [[*agent, "0"], [*agent, "1"]]
    rank = node["ranks"][1]
    assert [rank[key] for key in ("rank", "cores", "gpus", "threads")] == [3, [5], ["1"], 1]
    environment = {each["name"]: each for each in rank["environment"]}
    assert environment["RANK"] == {"name": "RANK", "value": "3", "origin": "placement"}
    undecided = {name for name, each in environment.items() if each["value"] is None}
    assert undecided == {"MASTER_PORT", "MUSTER_RUN_ID", "MUSTER_RUN_DIR", "TORCHELASTIC_RUN_ID"}
    every = [*node["environment"], *rank["environment"]]
    assert all(each.keys() == {"name", "value", "origin"} and each["origin"] for each in every)


def test_a_plan_writes_nothing_and_starts_nothing(muster_plan, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("subprocess.Popen", None)
    monkeypatch.setattr("os.fork", None)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MUSTER_RUNS", str(tmp_path / "runs"))
    assert muster_plan(COMMAND, "--runs", str(tmp_path / "runs"))[0] == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job.yaml", "site.yaml"]


def test_a_plan_that_run_would_refuse_is_refused_with_the_same_code(muster_plan, capsys) -> None:
    assert muster_plan(COMMAND.replace("SHARED: job", "RANK: '0'"))[0] == 78
    assert muster_plan(TRAIN, "--set", "train.batch_size=1")[0] == 78
    assert muster_plan(COMMAND, "--set", "nodes=0")[0] == 65
