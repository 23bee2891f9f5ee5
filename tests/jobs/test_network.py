"""Which interface leads where, asked of the kernel of this machine."""

import json
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator

import pytest

from muster.jobs.machine import network

OTHERS = [("eth0", "192.168.7.2"), ("eth1", "10.10.1.3"), ("ib0", "10.20.0.3"), ("ib0", "10.30.0.3")]


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.1.1", "localhost"])
def test_loopback_leads_to_loopback(address: str) -> None:
    route = network.route_to(address)
    assert route is not None
    assert route[0] == "lo"
    assert route[1].startswith("127.")


@pytest.mark.parametrize("address", ["", "no.such.host.invalid", "not a name", "x" * 300, "256.1.1.1", "\0"])
def test_what_is_no_address_has_no_route(address: str) -> None:
    assert network.route_to(address) is None


def test_own_addresses_are_numeric_without_loopback_and_lead_to_themselves() -> None:
    for interface, address in network.own_addresses():
        socket.inet_aton(address)
        assert not address.startswith("127.")
        assert network.route_to(address) == (interface, address)


@pytest.mark.parametrize(
    ("wanted", "chosen"),
    [
        ("eth1", ("eth1", "10.10.1.3")),
        ("ib0", ("ib0", "10.20.0.3")),
        ("10.30.0.0/16", ("ib0", "10.30.0.3")),
        ("10.10.1.9/24", ("eth1", "10.10.1.3")),
        ("10.0.0.0/8", ("eth1", "10.10.1.3")),
        ("eth9", None),
        ("172.16.0.0/12", None),
        ("10.10.1.0/99", None),
        ("fe80::/10", None),
    ],
)
def test_a_network_is_chosen_by_interface_or_by_cidr(wanted: str, chosen: tuple[str, str] | None) -> None:
    assert network.choose(OTHERS, wanted) == chosen
    assert network.choose([list(pair) for pair in OTHERS], wanted) == chosen  # as it comes out of JSON


@pytest.fixture
def node() -> Iterator[str]:
    """A network namespace with two cards, one of them with two addresses, and a bridge over a third."""
    name = f"muster-network-{os.getpid()}"
    subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        for line in (
            "link set lo up",
            "link add eth1 address 02:00:00:00:01:01 type veth peer name far1",
            "link add eth2 address 02:00:00:00:01:02 type veth peer name far2",
            "link add eth3 address 02:00:00:00:01:03 type veth peer name far3",
            "link add br0 address 02:00:00:00:01:03 type bridge",
            "addr add 10.10.1.3/24 dev eth1",
            "addr add 10.20.0.3/16 dev eth2",
            "addr add 10.30.0.3/16 dev eth2",
            "addr add 10.40.0.3/16 dev br0",
            "-6 addr add fd00:1::3/64 dev eth1 nodad",
            *(f"link set {each} up" for each in ("eth1", "far1", "eth2", "far2", "eth3", "far3", "br0")),
        ):
            subprocess.run(["ip", "-n", name, *line.split()], check=True)
        yield name
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=True)


def inside(node: str, expression: str) -> object:
    """Evaluate an expression on our module in a node, whose /sys still shows this machine's interfaces."""
    from muster.jobs.basics.boot import CODE_ROOT

    code = f"import json, sys; sys.path.insert(0, {str(CODE_ROOT)!r}); from muster.jobs.machine import network; "
    code += f"print(json.dumps({expression}))"
    argv = ["nsenter", f"--net=/run/netns/{node}", shutil.which("python3") or "python3", "-I", "-c", code]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=20)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


OWN = [("eth0", "10.1.0.2"), ("ib0", "10.10.1.2")]


@pytest.mark.parametrize(
    ("address", "wanted", "bound"),
    [
        ("10.10.1.2", "", "10.10.1.2"),
        ("10.10.1.2", "eth0", "10.1.0.2"),  # the user's choice counts
        ("", "10.10.1.0/24", "10.10.1.2"),
        ("10.10.1.2", "ib7", "127.0.0.1"),  # nobody is let in by mistake: the supervisor refuses it
        ("127.0.0.1", "", "127.0.0.1"),
        ("127.0.1.1", "", "127.0.1.1"),
        ("203.0.113.7", "", ""),  # translated on its way to us
        ("localhost", "", ""),  # a name of loopback: the others would not reach it
        ("no.such.name.invalid", "", ""),
        ("", "", ""),
    ],
)
def test_a_port_is_bound_to_the_address_by_which_others_reach_this_host(address: str, wanted: str, bound: str) -> None:
    assert network.bindable(address, wanted, OWN) == bound


@pytest.mark.cluster
def test_on_a_node_with_several_networks_each_peer_has_its_interface(node: str) -> None:
    assert sorted(inside(node, "network.own_addresses()")) == [  # type: ignore[call-overload]
        ["br0", "10.40.0.3"],
        ["eth1", "10.10.1.3"],
        ["eth2", "10.20.0.3"],
        ["eth2", "10.30.0.3"],
    ]
    peers = ["10.10.1.1", "10.20.9.9", "10.30.9.9", "10.10.1.3", "192.0.2.1", "fd00:1::1"]
    assert inside(node, f"[network.route_to(each) for each in {peers}]") == [
        ["eth1", "10.10.1.3"],
        ["eth2", "10.20.0.3"],
        ["eth2", "10.30.0.3"],
        ["eth1", "10.10.1.3"],
        None,
        ["eth1", "fd00:1::3"],
    ]
