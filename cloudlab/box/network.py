"""The box's network as batches for `ip`, `bridge` and `tc`. Pure.

    host      bridge mbK 10.10.K.254 --- mbKn0 --- mbKn1 ...      one end of each link
    node k                                 eth1 10.10.K.(k+1)     the other end, in the node's network namespace

Speed is shaped on both ends of every link: eth1 limits the data that a node sends, and the host's end limits the data
that the node receives. To unplug a node, its port of the bridge is set to the state "disabled": nothing passes in
either direction, and neither side is notified. (A veth outside the bridge would deliver the node's frames to the host
itself.)
"""

from collections.abc import Iterable
from typing import Final

from muster.cloudlab.box.spec import HEAD, LINK, BoxSpec, Rates

PORT_DISABLED: Final = 0
PORT_FORWARDING: Final = 3
QUEUE_MS: Final = 50  # longest time that a packet waits before it is dropped
BURST_S: Final = 0.004
LEAST_BURST: Final = 16 * 1024  # bytes: about ten packets of 1514 bytes
LOOSE: Final = 100 * 10**9  # bits per second, for a class that must have a rate but no limit
WHOLE_CLASS: Final = 0xFFFF  # number of the traffic class for peers without a separate rate


def bridge_lines(spec: BoxSpec) -> list[str]:
    """Return the lines for `ip -batch` that make the bridge."""
    return [
        # The bridge's MAC address is set, because it would otherwise change with the addresses of its ports.
        f"link add {spec.bridge} address {spec.mac(254)} type bridge forward_delay 0 mcast_snooping 0",
        f"link set {spec.bridge} alias {spec.alias}",
        f"addr add {spec.bridge_address}/24 dev {spec.bridge}",
        f"link set {spec.bridge} up",
    ]


def node_lines(spec: BoxSpec, node: str) -> list[str]:
    """Return the lines for `ip -batch` that make a node's namespace and the host's end of its link."""
    veth, netns = spec.veth(node), spec.netns(node)
    mac = spec.mac(spec.host_number(node))
    return [
        f"netns add {netns}",
        f"link add {veth} type veth peer name {LINK} address {mac} netns {netns}",
        f"link set {veth} master {spec.bridge} up",
    ]


def inner_lines(spec: BoxSpec, node: str) -> list[str]:
    """Return the lines for `ip -n NETNS -batch` that set up a node's side."""
    return ["link set lo up", f"addr add {spec.address(node)}/24 dev {LINK}", f"link set {LINK} up"]


def port_line(spec: BoxSpec, node: str, *, plugged: bool) -> str:
    """Return the line for `bridge -batch` that plugs a node's link in, or unplugs it silently."""
    return f"link set dev {spec.veth(node)} state {PORT_FORWARDING if plugged else PORT_DISABLED}"


def host_shaping(spec: BoxSpec, nodes: Iterable[str], rates: Rates) -> list[str]:
    """Return the lines for `tc -batch` that limit the data that nodes receive."""
    return [line for node in nodes if node != HEAD for line in _simple(spec.veth(node), rates.of(node))]


def node_shaping(spec: BoxSpec, node: str, rates: Rates) -> list[str]:
    """Return the lines for `tc -n NETNS -batch` that limit the data that a node sends."""
    if node == HEAD:
        return []
    slow = rates.slow_peers(node)
    if not slow:
        return _simple(LINK, rates.of(node))
    whole = rates.of(node) or LOOSE
    lines = [
        f"qdisc replace dev {LINK} root noqueue",
        f"qdisc replace dev {LINK} root handle 1: htb default {WHOLE_CLASS:x}",
        f"class add dev {LINK} parent 1: classid 1:{WHOLE_CLASS:x} htb {_htb(whole)}",
    ]
    for peer, rate in sorted(slow.items(), key=lambda item: spec.host_number(item[0])):
        minor = f"1:{spec.host_number(peer):x}"
        lines += [
            f"class add dev {LINK} parent 1: classid {minor} htb {_htb(rate)}",
            f"filter add dev {LINK} parent 1: protocol ip u32 match ip dst {spec.address(peer)}/32 flowid {minor}",
        ]
    return lines


def burst_bytes(rate: int) -> int:
    """Return the burst size in bytes: a few milliseconds of data, but at least ten packets."""
    return max(LEAST_BURST, round(rate * BURST_S / 8))


def _simple(device: str, rate: int | None) -> list[str]:
    if rate is None:
        return [f"qdisc replace dev {device} root noqueue"]
    tbf = f"tbf rate {rate}bit burst {burst_bytes(rate)} latency {QUEUE_MS}ms"
    return [f"qdisc replace dev {device} root {tbf}"]


def _htb(rate: int) -> str:
    burst = burst_bytes(rate)
    return f"rate {rate}bit burst {burst} cburst {burst} quantum 1514"
