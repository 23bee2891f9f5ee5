"""The plan of an attempt, as pure functions: cores, GPUs and threads; what stands in the start message."""

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from muster.jobs.basics.boot import importable
from muster.jobs.spec.site import Site
from muster.launch.plan.plan import (
    plan_nodes,
    preload,
    start_messages,
)
from muster.launch.wire.codec import decode, encode
from muster.launch.wire.messages import TO_AGENT
from support.plans import box, make_context, plan, values

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


# The start message ----------------------------------------------------------------------------------------------------


def test_a_command_is_started_by_its_argv_and_nothing_is_imported_for_it() -> None:
    context = make_context(nodes=2, ranks_per_node=2, setup=["module load x"], site=Site(setup=["umask 027"]))
    (message,) = start_messages(context, [plan(context, box(4))[1]], store=True, master_port=4242)
    assert decode(encode(message), TO_AGENT) == message
    attempt = "/runs/demo-20250101T000000Z-abc123/attempt-000"
    assert {name: value for name, value in vars(message).items() if name != "ranks"} == {
        "attempt": 0,
        "node": 1,
        "attempt_dir": attempt,
        "apart": False,
        "workdir": "/srv/job",
        "setup": ("umask 027", "module load x"),
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
                "PYTHONPATH": importable(),
            },
            "python": (),
        },
        "console": (),
        "joins": False,
    }
    assert [rank["rank"] for rank in message.ranks] == [2, 3]
    last = dict(message.ranks[1])
    env = last.pop("env")
    assert (env["RANK"], env["LOCAL_RANK"], env["MASTER_PORT"]) == ("3", "1", "4242")
    assert last == {
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
    context = replace(make_context(entry="muster.jobs.train.main:run_rank", nodes=1), options={"steps": 3})
    (message,) = start_messages(context, [plan(context, box(2))[0]], store=True, master_port=1)
    (rank,) = message.ranks
    assert "argv" not in rank
    assert rank["call"] == "muster.jobs.train.main:run_rank"
    job = {"name": "demo", "kind": "command", "nodes": 1, "settings": {"argv": ["program", "--flag", "a b"]}}
    assert rank["payload"] == {"job": job, "steps": 3, "stays": False}
    assert message.console == (0,)
    assert message.warm["preload"] == preload(context) == "torch,torch.distributed,muster.jobs.train.main"
