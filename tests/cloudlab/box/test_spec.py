"""What a box can be, and what everything in it is called."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.cloudlab.box.spec import (
    MAX_NODES,
    MAX_NUMBER,
    BoxSpec,
    Rates,
    netns_pattern,
    parse_clocks,
    parse_rate,
    rate_text,
)
from muster.jobs.basics.errors import UsageError

NODES = st.sampled_from([f"node{k}" for k in range(6)])
RATES = st.integers(8_000, 400 * 10**9)


@given(st.integers(1, MAX_NODES), st.integers(1, MAX_NUMBER), st.booleans())
def test_names_and_addresses_never_collide_and_links_fit_the_kernel(nodes: int, number: int, slurm: bool) -> None:
    spec = BoxSpec(nodes=nodes, number=number, slurm=slurm)
    addresses = [spec.address(node) for node in spec.members] + [spec.bridge_address]
    links = [spec.veth(node) for node in spec.members] + [spec.bridge]
    macs = [spec.mac(spec.host_number(node)) for node in spec.members] + [spec.mac(254)]
    for unique in (addresses, links, macs):
        assert len(set(unique)) == len(spec.members) + 1
    assert all(len(link) <= 15 for link in links)
    assert all(netns_pattern(spec.name).fullmatch(spec.netns(node)) for node in spec.members)


def test_the_namespaces_of_one_box_are_not_those_of_another_with_a_longer_name() -> None:
    assert not netns_pattern("a").fullmatch(BoxSpec(name="a-node0").netns("node1"))
    assert not netns_pattern("a.b").fullmatch(BoxSpec(name="axb").netns("node1"))


def test_addresses() -> None:
    spec = BoxSpec(nodes=2, slurm=True, number=1)
    assert spec.members == ("head", "node0", "node1")
    assert spec.compute == ("node0", "node1")
    assert [spec.address(node) for node in spec.members] == ["10.10.1.253", "10.10.1.1", "10.10.1.2"]
    assert spec.network == "10.10.1.0/24"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nodes": 0}, "nodes must be from 1 to 250, got 0"),
        ({"nodes": 251}, "nodes must be from 1 to 250, got 251"),
        ({"name": "../x"}, "'../x' is not a valid name for a box"),
        ({"name": ""}, "'' is not a valid name for a box"),
        ({"name": "x" * 33}, "is not a valid name for a box"),
        ({"clocks": {"node4": "+1s"}}, "box box has no 'node4'; it has node0 to node3"),
        ({"clocks": {"node0": "soon"}}, "clock of node0: expected an offset such as [+]180s, got 'soon'"),
    ],
)
def test_what_cannot_be_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        BoxSpec(**change)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("1gbit", 10**9),
        ("100mbit", 10**8),
        ("2.5Gbit", 25 * 10**8),
        ("64kbit", 64_000),
        ("none", None),
        ("9600bit", 9600),
    ],
)
def test_rates(text: str, rate: int | None) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize("text", ["", "fast", "1", "1g", "1gbyte", "-1gbit", "0mbit", "7999bit", "500gbit", "1 gbit"])
def test_what_is_no_rate(text: str) -> None:
    with pytest.raises(UsageError, match="is not a rate; expected one from 8kbit to 400gbit, such as 100mbit, or none"):
        parse_rate(text)


@given(st.none() | RATES)
def test_a_rate_reads_back_as_it_is_written(rate: int | None) -> None:
    assert parse_rate(rate_text(rate)) == rate


@given(NODES, NODES, RATES)
def test_a_slow_pair_is_slow_from_both_sides_until_it_is_not(one: str, other: str, rate: int) -> None:
    if one == other:
        return
    rates = Rates(10**9).with_pair(one, other, rate)
    assert (rates.slow_peers(one), rates.slow_peers(other)) == ({other: rate}, {one: rate})
    assert rates.with_pair(other, one, None) == Rates(10**9)


@given(NODES, RATES)
def test_a_slow_node_has_a_rate_of_its_own_until_it_has_not(node: str, rate: int) -> None:
    rates = Rates(10**9).with_node(node, rate)
    assert (rates.of(node), rates.of("head")) == (rate, 10**9)
    assert rates.with_pair("node0", "node1", 7).of(node) == rate
    assert rates.with_node(node, None) == Rates(10**9)


def test_clocks() -> None:
    assert parse_clocks(["node1=+180s", "node2=-3d"]) == {"node1": "+180s", "node2": "-3d"}
    with pytest.raises(UsageError, match=r"--clock node1: expected NODE=OFFSET, such as node2=[+]180s"):
        parse_clocks(["node1"])
