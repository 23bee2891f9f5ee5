"""The batches for ip, bridge and tc, in full."""

import pytest

from muster.cloudlab.box import network
from muster.cloudlab.box.spec import BoxSpec, Rates

SPEC = BoxSpec(name="four", nodes=4, slurm=True, number=7)
GBIT = 10**9


def test_bridge() -> None:
    assert network.bridge_lines(SPEC) == [
        "link add mb7 address 02:00:0a:0a:07:fe type bridge forward_delay 0 mcast_snooping 0",
        "link set mb7 alias muster-box-four",
        "addr add 10.10.7.254/24 dev mb7",
        "link set mb7 up",
    ]


def test_node() -> None:
    assert network.node_lines(SPEC, "node3") == [
        "netns add muster-four-node3",
        "link add mb7n3 type veth peer name eth1 address 02:00:0a:0a:07:04 netns muster-four-node3",
        "link set mb7n3 master mb7 up",
    ]
    assert network.inner_lines(SPEC, "node3") == [
        "link set lo up",
        "addr add 10.10.7.4/24 dev eth1",
        "link set eth1 up",
    ]
    assert network.node_lines(SPEC, "head")[1] == (
        "link add mb7h type veth peer name eth1 address 02:00:0a:0a:07:fd netns muster-four-head"
    )


def test_plugging() -> None:
    assert network.port_line(SPEC, "node0", plugged=True) == "link set dev mb7n0 state 3"
    assert network.port_line(SPEC, "node0", plugged=False) == "link set dev mb7n0 state 0"


def test_both_ends_of_a_link_are_shaped_and_the_heads_is_not() -> None:
    tbf = "root tbf rate 1000000000bit burst 500000 latency 50ms"
    assert network.host_shaping(SPEC, SPEC.members, Rates(GBIT)) == [
        f"qdisc replace dev mb7n{k} {tbf}" for k in range(4)
    ]
    assert network.node_shaping(SPEC, "node1", Rates(GBIT)) == [f"qdisc replace dev eth1 {tbf}"]
    assert network.node_shaping(SPEC, "head", Rates(GBIT)) == []


def test_no_rate_removes_what_was_there() -> None:
    assert network.host_shaping(SPEC, ["node0"], Rates()) == ["qdisc replace dev mb7n0 root noqueue"]
    assert network.node_shaping(SPEC, "node0", Rates()) == ["qdisc replace dev eth1 root noqueue"]


def test_a_slow_pair_is_a_class_of_its_own_in_both_nodes_and_nowhere_else() -> None:
    rates = Rates(GBIT).with_pair("node2", "node0", 10**7)
    assert network.node_shaping(SPEC, "node0", rates) == [
        "qdisc replace dev eth1 root noqueue",
        "qdisc replace dev eth1 root handle 1: htb default ffff",
        "class add dev eth1 parent 1: classid 1:ffff htb rate 1000000000bit burst 500000 cburst 500000 quantum 1514",
        "class add dev eth1 parent 1: classid 1:3 htb rate 10000000bit burst 16384 cburst 16384 quantum 1514",
        "filter add dev eth1 parent 1: protocol ip u32 match ip dst 10.10.7.3/32 flowid 1:3",
    ]
    assert "match ip dst 10.10.7.1/32 flowid 1:1" in network.node_shaping(SPEC, "node2", rates)[-1]
    for other in ("node1", "node3"):
        assert network.node_shaping(SPEC, other, rates) == network.node_shaping(SPEC, other, Rates(GBIT))
    assert network.host_shaping(SPEC, SPEC.compute, rates) == network.host_shaping(SPEC, SPEC.compute, Rates(GBIT))


def test_a_slow_node_is_slow_at_both_ends_of_its_link_and_no_other_is() -> None:
    rates = Rates(GBIT).with_node("node2", 750 * 10**6)
    slow = "root tbf rate 750000000bit burst 375000 latency 50ms"
    assert network.host_shaping(SPEC, ["node2"], rates) == [f"qdisc replace dev mb7n2 {slow}"]
    assert network.node_shaping(SPEC, "node2", rates) == [f"qdisc replace dev eth1 {slow}"]
    for other in ("node0", "node1", "node3"):
        assert network.node_shaping(SPEC, other, rates) == network.node_shaping(SPEC, other, Rates(GBIT))
    with_pair = network.node_shaping(SPEC, "node2", rates.with_pair("node2", "node0", 10**7))
    assert with_pair[2].startswith("class add dev eth1 parent 1: classid 1:ffff htb rate 750000000bit")


@pytest.mark.parametrize(("rate", "burst"), [(GBIT, 500_000), (10**8, 50_000), (10**6, 16_384), (10**10, 5_000_000)])
def test_a_burst_is_a_few_milliseconds_and_some_packets_at_least(rate: int, burst: int) -> None:
    assert network.burst_bytes(rate) == burst
