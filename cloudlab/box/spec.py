"""The specification of a box: its name, size, speed, addresses, and the names of its parts. Pure.

A box has a number K and the network 10.10.K.0/24. Node k is `nodek` with address 10.10.K.(k+1). With Slurm there is
also `head`, for the controller and logins. The host is in that network too, as 10.10.K.254, the address of the bridge.
Names of links have at most 15 characters, so they contain the number instead of the name of the box.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from muster.jobs.basics.errors import UsageError

DEFAULT_NAME: Final = "box"
DEFAULT_NUMBER: Final = 1
MAX_NODES: Final = 250
MAX_NUMBER: Final = 250
HEAD: Final = "head"
HEAD_HOST: Final = 253  # the last byte of the head's address
BRIDGE_HOST: Final = 254
LINK: Final = "eth1"  # name of the link within a node; eth0 would be CloudLab's control network

_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]{0,31}")
_RATE: Final = re.compile(r"(?P<number>\d+(?:\.\d+)?)(?P<unit>[kmg]?)bit(?:/s|ps)?", re.IGNORECASE)
_OFFSET: Final = re.compile(r"[+-]\d+(?:\.\d+)?[smhd]?")
_UNITS: Final = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}
_SLOWEST: Final = 8_000  # bits per second; with less, a packet takes seconds, and tc's numbers overflow
_FASTEST: Final = 400 * 10**9


@dataclass(frozen=True)
class BoxSpec:
    """All settings of a box, decided before anything is created."""

    name: str = DEFAULT_NAME
    nodes: int = 4
    rate: int | None = 10**9  # bits per second of every link, each way; None: unlimited
    slurm: bool = False
    number: int = 0  # the number K of the box; 0 until it is chosen
    private_runs: str | None = None  # folder of runs, which is a different folder on each node
    clocks: Mapping[str, str] = field(default_factory=dict)  # node -> offset of its clock, such as +180s

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            UsageError: if a value is out of range.
        """
        check_name(self.name)
        if not 1 <= self.nodes <= MAX_NODES:
            raise UsageError(f"box {self.name}: nodes must be from 1 to {MAX_NODES}, got {self.nodes}")
        for node, offset in self.clocks.items():
            self.check_node(node)
            if not _OFFSET.fullmatch(offset):
                raise UsageError(f"box {self.name}: clock of {node}: expected an offset such as +180s, got {offset!r}")

    @property
    def compute(self) -> tuple[str, ...]:
        """The names of the nodes that run jobs."""
        return tuple(f"node{k}" for k in range(self.nodes))

    @property
    def members(self) -> tuple[str, ...]:
        """The names of all nodes; the head, if any, comes first."""
        return (HEAD, *self.compute) if self.slurm else self.compute

    @property
    def network(self) -> str:
        """The network of the box, as a CIDR."""
        return f"10.10.{self.number}.0/24"

    @property
    def bridge(self) -> str:
        """The name of the bridge."""
        return f"mb{self.number}"

    @property
    def alias(self) -> str:
        """The alias of the bridge, which names its box."""
        return bridge_alias(self.name)

    @property
    def bridge_address(self) -> str:
        """The address of the host in the box's network."""
        return f"10.10.{self.number}.{BRIDGE_HOST}"

    def host_number(self, node: str) -> int:
        """Return the last byte of a node's address."""
        return HEAD_HOST if node == HEAD else int(node.removeprefix("node")) + 1

    def address(self, node: str) -> str:
        """Return the address of a node."""
        return f"10.10.{self.number}.{self.host_number(node)}"

    def mac(self, host_number: int) -> str:
        """Return a MAC address. A node that is recreated keeps its address, so that its peers find it at once."""
        return f"02:00:0a:0a:{self.number:02x}:{host_number:02x}"

    def veth(self, node: str) -> str:
        """Return the name of the host's end of a node's link."""
        return f"{self.bridge}{'h' if node == HEAD else 'n' + node.removeprefix('node')}"

    def netns(self, node: str) -> str:
        """Return the name of a node's network namespace."""
        return f"muster-{self.name}-{node}"

    def check_node(self, node: str) -> str:
        """Check that the box has a node of this name; return it.

        Raises:
            UsageError: if there is no such node.
        """
        if node not in self.members:
            last = self.compute[-1]
            known = "node0" if self.nodes == 1 else f"node0 to {last}"
            raise UsageError(f"box {self.name} has no {node!r}; it has {known}{' and head' if self.slurm else ''}")
        return node

    def check_link(self, node: str) -> str:
        """Check that a node's link can be shaped; return the node's name.

        Raises:
            UsageError: if the node does not exist, or is the head.
        """
        if self.check_node(node) == HEAD:
            raise UsageError(
                f"box {self.name}: the link of {HEAD} is not shaped; name only node0 to {self.compute[-1]}"
            )
        return node


@dataclass(frozen=True)
class Rates:
    """The speeds of all links, of slow nodes, and of slow pairs, in bits per second each way."""

    every: int | None = None
    pairs: Mapping[tuple[str, str], int] = field(default_factory=dict)  # by pair (a, b) with a < b, for both directions
    nodes: Mapping[str, int] = field(default_factory=dict)

    def of(self, node: str) -> int | None:
        """Return the rate of a node's link."""
        return self.nodes.get(node, self.every)

    def slow_peers(self, node: str) -> dict[str, int]:
        """Return the peers to which a node has a separate rate."""
        found = {}
        for (one, other), rate in self.pairs.items():
            if node in (one, other):
                found[other if node == one else one] = rate
        return found

    def with_pair(self, one: str, other: str, rate: int | None) -> "Rates":
        """Return a copy with a new rate between two nodes; None resets it to the general rate."""
        pairs = {pair: old for pair, old in self.pairs.items() if pair != _pair(one, other)}
        if rate is not None:
            pairs[_pair(one, other)] = rate
        return Rates(self.every, pairs, self.nodes)

    def with_node(self, node: str, rate: int | None) -> "Rates":
        """Return a copy with a new rate for one node's link; None resets it to the general rate."""
        nodes = {name: old for name, old in self.nodes.items() if name != node}
        if rate is not None:
            nodes[node] = rate
        return Rates(self.every, self.pairs, nodes)


def check_name(name: str) -> str:
    """Check that a name is valid for a box; return it.

    Raises:
        UsageError: if the name is not valid.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(f"{name!r} is not a valid name for a box; expected up to 32 letters, digits, dots, - and _")
    return name


def bridge_alias(name: str) -> str:
    """Return the alias of a box's bridge, by which the bridge is found if the box's number is unknown."""
    return f"muster-box-{name}"


def netns_pattern(name: str) -> re.Pattern[str]:
    """Return a pattern that matches a box's network namespaces, to find them if the box's size is unknown."""
    return re.compile(rf"muster-{re.escape(name)}-(?:node\d+|{HEAD})")


def parse_rate(text: str) -> int | None:
    """Parse a rate such as 1gbit or 2.5mbit; None for `none`.

    Raises:
        UsageError: if the text is not a rate.
    """
    if text == "none":
        return None
    match = _RATE.fullmatch(text)
    rate = round(float(match["number"]) * _UNITS[match["unit"].lower()]) if match else 0
    if not _SLOWEST <= rate <= _FASTEST:
        raise UsageError(f"{text!r} is not a rate; expected one from 8kbit to 400gbit, such as 100mbit, or none")
    return rate


def rate_text(rate: int | None) -> str:
    """Format a rate in the largest exact unit, so that it parses to the same value."""
    if rate is None:
        return "none"
    unit = next((unit for unit in ("g", "m", "k") if rate % _UNITS[unit] == 0), "")
    return f"{rate // _UNITS[unit]}{unit}bit"


def parse_clocks(texts: list[str]) -> dict[str, str]:
    """Parse clock offsets such as `node2=+180s`.

    Raises:
        UsageError: if a text is not of the form NODE=OFFSET.
    """
    clocks = {}
    for text in texts:
        node, equals, offset = text.partition("=")
        if not equals:
            raise UsageError(f"--clock {text}: expected NODE=OFFSET, such as node2=+180s")
        clocks[node] = offset
    return clocks


def _pair(one: str, other: str) -> tuple[str, str]:
    return (one, other) if one < other else (other, one)
