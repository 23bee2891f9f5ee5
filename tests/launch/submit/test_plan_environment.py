"""The environment of ranks, as the plan of an attempt has it: who wins, where each value is from."""

from dataclasses import replace
from pathlib import Path

import pytest

from muster.jobs.basics.boot import importable
from muster.jobs.basics.errors import RefusedError
from muster.jobs.hosts.ranks import RankEnv, read
from muster.jobs.runfolder.rundir import RunDir
from muster.jobs.spec.site import Site
from muster.launch.plan.plan import (
    plan_nodes,
    shared_environment,
    start_messages,
)
from support.plans import box, make_context, plan, shared, values


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
        assert str(caught.value) == f"{file}: env.{name}: Muster sets this for each rank; remove it"
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
        "PYTHONPATH": (importable(), "the folder of `import muster` first"),
    }
    assert shared(make_context(), threads=3)["OMP_NUM_THREADS"] == ("3", "threads_per_rank: 1")


def test_on_one_host_gloo_meets_on_loopback_and_nccl_is_left_alone() -> None:
    for interface in ("", "lo", "eth1"):
        found = shared(make_context(), interface=interface)
        assert found["GLOO_SOCKET_IFNAME"] == ("lo", "all ranks are on this machine")
        assert "NCCL_SOCKET_IFNAME" not in found


def test_on_several_hosts_both_use_the_interface_that_leads_to_the_master() -> None:
    found = shared(make_context(address="10.10.1.1"), interface="eth1")
    origin = "the route to the master 10.10.1.1"
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
    (message,) = start_messages(context, [second], store=True, master_port=4242)
    assert (message.apart, message.attempt_dir) == (True, f"{elsewhere.path}/attempt-000")
    assert message.ranks[0]["out"] == f"{elsewhere.path}/attempt-000/rank-00001.out"


@pytest.mark.parametrize("gpus", [(), ("0", "1", "2", "3")])
def test_a_start_message_has_the_variables_and_files_of_each_rank(gpus: tuple[str, ...]) -> None:
    context = make_context(nodes=2, ranks_per_node=3, address="10.1.1.1")
    plans = plan(context, box(8, *gpus))
    attempt = context.run.attempt(0)
    for node, message in zip(plans, start_messages(context, plans, store=True, master_port=4242), strict=True):
        for rank, start in zip(node.ranks, message.ranks, strict=True):
            assert start["env"] == values(rank)
            assert (start["out"], start["err"]) == (str(attempt.out(rank.rank)), str(attempt.err(rank.rank)))


def test_every_value_has_an_origin() -> None:
    site = Site(env={"A": "1"})
    for node in plan(make_context(nodes=2, site=site, env={"B": "2"}), box(4, "0", "1")):
        for each in (*node.warm_environment, *(value for rank in node.ranks for value in rank.environment)):
            assert each.origin, each.name
