"""Placement is compared with drawn tables; shares with what fairness means."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.jobs.basics.errors import RefusedError, RunFolderError
from muster.jobs.hosts.placement import Host, Login, NodePlacement, Placement, divide, pin, place
from muster.jobs.spec.job import CommandSettings, Job

HOSTS = (Host("n01", "10.0.0.1", 4), Host("n02", "10.0.0.2", 2), Host("n03", "10.0.0.3"))


def job(nodes: int, ranks_per_node: Any = 1) -> Job:
    settings = CommandSettings(argv=["true"])
    return Job(name="j", nodes=nodes, ranks_per_node=ranks_per_node, kind="command", settings=settings)


def test_ranks_lie_in_blocks_in_the_order_of_the_hosts() -> None:
    #   node  host  ranks        n03 is not needed
    #   0     n01   0 1
    #   1     n02   2 3
    assert place(job(2, 2), HOSTS) == Placement(
        nodes=(NodePlacement(0, "n01", "10.0.0.1", 0, 2), NodePlacement(1, "n02", "10.0.0.2", 2, 2)),
        world_size=4,
        master_addr="10.0.0.1",
    )


def test_slots_give_each_host_as_many_ranks_as_it_has_room_for() -> None:
    placement = place(job(2, "slots"), HOSTS)
    assert [list(node.rank_range) for node in placement.nodes] == [[0, 1, 2, 3], [4, 5]]


def test_a_rank_is_told_where_it_stands() -> None:
    placement = place(job(2, "slots"), HOSTS)
    env = placement.rank_env(5, master_port=4000, attempt=2, run_id="r", run_dir="/r", agent_store=True)
    assert (env.rank, env.world_size, env.local_rank, env.local_world_size) == (5, 6, 1, 2)
    assert (env.node_rank, env.nodes, env.master_addr, env.master_port) == (1, 2, "10.0.0.1", 4000)
    assert (env.attempt, env.run_id, env.run_dir, env.agent_store) == (2, "r", "/r", True)


def test_there_is_no_rank_beyond_the_world() -> None:
    with pytest.raises(ValueError, match="rank 6 is not one of 6"):
        place(job(2, "slots"), HOSTS).node_of(6)


@pytest.mark.parametrize(
    ("wanted", "hosts", "message"),
    [
        (job(4), HOSTS, "job 'j' needs 4 hosts, got 3"),
        (job(1), (), "job 'j' needs 1 host, got 0"),
        (job(2, 3), HOSTS, "host n02: must have at least 3 slots for ranks_per_node, got 2"),
        (job(3, "slots"), HOSTS, "host n03: has no slots"),
        (job(1, "slots"), (Host("n", "10.0.0.1", 0),), "must have at least 1 slot, got 0"),
        (job(2), (Host("a", "a.local"), HOSTS[1]), "the address 'a.local' is not numeric, and 2 nodes"),
        (job(2), (Host("a", "127.0.1.1"), HOSTS[1]), "host n02 cannot reach the master address 127.0.1.1"),
        (job(2), (Host("a", "0.0.0.0"), HOSTS[1]), "host n02 cannot reach the master address 0.0.0.0"),
    ],
)
def test_what_does_not_fit_is_refused(wanted: Job, hosts: tuple[Host, ...], message: str) -> None:
    with pytest.raises(RefusedError, match=message):
        place(wanted, hosts)


@pytest.mark.parametrize(
    ("wanted", "hosts", "master", "one_host"),
    [
        (job(3), [Host("here", "127.0.0.1")] * 3, "127.0.0.1", True),  # pretend nodes
        (job(2), [Host("a", "127.0.0.1"), Host("b", "127.0.0.1")], "127.0.0.1", True),  # one machine of two names
        (job(1, 4), [Host("login", "login.local")], "127.0.0.1", True),
        (job(1, 4), [Host("a", "")], "127.0.0.1", True),
        (job(2), [Host("a", ""), Host("b", "")], "", False),  # node 0 will say
        (job(2), [Host("a", "fd00::1"), Host("b", "fd00::2")], "fd00::1", False),
    ],
)
def test_ranks_meet_at_node_0_and_those_of_one_host_on_the_loopback(
    wanted: Job, hosts: list[Host], master: str, one_host: bool
) -> None:
    placement = place(wanted, hosts)
    assert (placement.master_addr, placement.one_host) == (master, one_host)
    assert [node.host for node in placement.nodes] == [host.name for host in hosts]


def test_where_node_0_says_is_where_hosts_without_addresses_meet() -> None:
    placement = place(job(2), [Host("a", ""), Host("b", "")])
    known = placement.meeting_at("10.0.0.1")
    assert (known.master_addr, known.nodes, known.world_size) == ("10.0.0.1", placement.nodes, 2)


@pytest.mark.parametrize(
    ("address", "one_host"),
    [("127.0.0.1", True), ("127.0.1.1", True), ("::1", True), ("10.0.0.1", False), ("fd00::1", False), ("", False)],
)
def test_ranks_that_meet_on_loopback_are_on_one_host(address: str, one_host: bool) -> None:
    assert place(job(1), [Host("a", "10.0.0.1")]).meeting_at(address).one_host == one_host


def test_how_a_host_is_logged_in_to_does_not_matter_to_its_ranks() -> None:
    plain = place(job(2, 2), HOSTS)
    with_logins = [Host(host.name, host.address, host.slots, Login("gate", "alice", 2222)) for host in HOSTS]
    assert place(job(2, 2), with_logins) == plain


@given(st.lists(st.integers(1, 9), min_size=1, max_size=20))
def test_a_placement_survives_json_and_holds_every_rank_once(slots: list[int]) -> None:
    hosts = [Host(f"n{index}", f"10.0.0.{index + 1}", count) for index, count in enumerate(slots)]
    placement = place(job(len(hosts), "slots"), hosts)
    assert Placement.from_json(json.loads(json.dumps(placement.to_json()))) == placement
    assert [rank for node in placement.nodes for rank in node.rank_range] == list(range(sum(slots)))


def _changed(**changes: Any) -> dict[str, Any]:
    return {**place(job(2), HOSTS).to_json(), **changes}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "version None"),
        (_changed(version=2), "found version 2; this Muster reads version 1"),
        (_changed(world_size=3), "do not have ranks"),
        (_changed(nodes=[{}]), "is damaged"),
        (_changed(nodes=None), "is damaged"),
        (_changed(nodes=[{**_changed()["nodes"][0], "ranks": "1"}]), "is damaged"),
    ],
)
def test_a_placement_that_was_tampered_with_is_refused(value: Any, message: str) -> None:
    with pytest.raises(RunFolderError, match=message):
        Placement.from_json(value)


@given(st.integers(1, 64), st.integers(1, 64))
def test_pinning_is_fair_and_contiguous_and_covers_every_core(cores: int, ranks: int) -> None:
    slices = pin(range(cores), ranks)
    if ranks > cores:
        assert slices == [tuple(range(cores))] * ranks
        return
    assert [core for part in slices for core in part] == list(range(cores))
    sizes = [len(part) for part in slices]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("items", "parts", "shares"),
    [
        ([0, 1, 2, 3, 4], 2, [(0, 1, 2), (3, 4)]),
        ([0, 1], 5, [(0,), (1,), (0,), (1,), (0,)]),
        ([0, 1], 2, [(0,), (1,)]),
        ([], 3, [(), (), ()]),
    ],
)
def test_pretend_nodes_divide_what_a_machine_has(items: list[int], parts: int, shares: list[tuple[int, ...]]) -> None:
    assert divide(items, parts) == shares


def test_no_known_cores_pin_nothing() -> None:
    assert pin([], 2) == [(), ()]
