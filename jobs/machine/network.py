"""This host's network interfaces, queried from the kernel: their addresses, and the interface that leads to a peer.

System calls are used, because /sys/class/net may show the network namespace of another process.
"""

import array
import fcntl
import socket
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

SIOCGIFCONF: Final = 0x8912  # all IPv4 addresses, <linux/sockios.h>
IFREQ_BYTES: Final = struct.calcsize("16sQQQ")  # struct ifreq: a name, and a union of at most three words
NAME_BYTES: Final = 16
ADDRESSES: Final = 1024
INET6: Final = Path("/proc/net/if_inet6")
LOOPBACK: Final = "127.0.0.1"
ANY_PORT: Final = 9  # connecting a datagram socket sends nothing, but determines the route

Route = tuple[str, str]  # an interface, and this host's address on it


def own_addresses() -> list[Route]:
    """List (interface, IPv4 address) pairs of this host without loopback, in the kernel's order."""
    return [(name, address) for name, address in _ipv4() if not address.startswith("127.")]


def is_own(address: str) -> bool:
    """Return True if a socket of this host can be bound to the IPv4 address."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return address != "0.0.0.0"


def route_to(address: str) -> Route | None:
    """Return the interface and address from which this host sends packets to `address`; None if there is no route.

    For one of this host's own addresses, return the interface that has it, although such packets use loopback.
    """
    try:
        found = socket.getaddrinfo(address, ANY_PORT, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return None  # the name is unknown
    for family, kind, protocol, _, where in sorted(found, key=lambda entry: entry[0] != socket.AF_INET):
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.connect(where)
            except OSError:
                continue
            own = str(probe.getsockname()[0]).partition("%")[0]
        for name, each in _ipv4() if family == socket.AF_INET else _ipv6():
            if each == own:
                return name, own
        if own.startswith("127."):
            return "lo", own  # all of 127.0.0.0/8 is on lo, but only one address is listed
    return None


def choose(addresses: Iterable[Sequence[str]], wanted: str) -> Route | None:
    """Return the first pair whose interface is `wanted`, or whose address is in the network `wanted`; else None."""
    pairs = [(name, address) for name, address in addresses]
    if "/" not in wanted:
        return next((pair for pair in pairs if pair[0] == wanted), None)
    import ipaddress  # imported late: it takes 5 ms, and few agents need it

    try:
        network = ipaddress.ip_network(wanted, strict=False)
    except ValueError:
        return None
    return next((pair for pair in pairs if ipaddress.ip_address(pair[1]) in network), None)


def bindable(address: str, wanted: str, addresses: Sequence[Route]) -> str:
    """Return the address to listen on: that of the interface or network `wanted`, if given.

    Without `wanted`, return an address of this host to which `address` resolves. If there is none, as behind address
    translation, return "", which means every address.
    """
    if wanted:
        chosen = choose(addresses, wanted)
        return chosen[1] if chosen is not None else LOOPBACK  # the caller refuses loopback if other nodes must reach it
    own = {each for _, each in addresses}
    try:
        found = [str(entry[4][0]) for entry in socket.getaddrinfo(address, None, socket.AF_INET)] if address else []
    except (OSError, UnicodeError):
        found = []
    if address.startswith("127."):
        return address
    return next((each for each in found if each in own), "")


def _ipv4() -> list[Route]:
    """List every IPv4 address with its interface, including secondary ones."""
    buffer = array.array("B", bytes(ADDRESSES * IFREQ_BYTES))
    start, length = buffer.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        filled = struct.unpack("iP", fcntl.ioctl(probe.fileno(), SIOCGIFCONF, struct.pack("iP", length, start)))[0]
    found = []
    for offset in range(0, filled, IFREQ_BYTES):
        name = bytes(buffer[offset : offset + NAME_BYTES]).partition(b"\0")[0].decode(errors="replace")
        found.append((name, socket.inet_ntoa(bytes(buffer[offset + NAME_BYTES + 4 : offset + NAME_BYTES + 8]))))
    return found


def _ipv6() -> list[Route]:
    """List every IPv6 address with its interface; empty if the kernel has no IPv6."""
    try:
        lines = INET6.read_text().splitlines()
    except OSError:
        return []
    rows = [line.split() for line in lines]
    return [(row[5], socket.inet_ntop(socket.AF_INET6, bytes.fromhex(row[0]))) for row in rows]
