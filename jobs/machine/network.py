"""This host's network interfaces, asked of the kernel: which address is on which, and which one leads to a peer.

The kernel's own calls, not /sys/class/net: that may show another network namespace than this process is in.
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
ANY_PORT: Final = 9  # connecting a datagram socket sends nothing: it only asks for the route

Route = tuple[str, str]  # an interface, and this host's address on it


def own_addresses() -> list[Route]:
    """List (interface, IPv4 address) of this host, without loopback, in the kernel's order."""
    return [(name, address) for name, address in _ipv4() if not address.startswith("127.")]


def is_own(address: str) -> bool:
    """True for an IPv4 address that a port of this host can be bound to."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return address != "0.0.0.0"


def route_to(address: str) -> Route | None:
    """Return the interface and own address that packets to `address` leave by; None where there is no way.

    For an address of this host's own it is the interface that has it, not the loopback that such packets take.
    """
    try:
        found = socket.getaddrinfo(address, ANY_PORT, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return None  # no such name
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
            return "lo", own  # all of 127.0.0.0/8 is there, one of them is listed
    return None


def choose(addresses: Iterable[Sequence[str]], wanted: str) -> Route | None:
    """Choose among (interface, address) by an interface's name or a network (10.10.1.0/24); None where none fits."""
    pairs = [(name, address) for name, address in addresses]
    if "/" not in wanted:
        return next((pair for pair in pairs if pair[0] == wanted), None)
    import ipaddress  # here: it costs agents 5 ms that few need

    try:
        network = ipaddress.ip_network(wanted, strict=False)
    except ValueError:
        return None
    return next((pair for pair in pairs if ipaddress.ip_address(pair[1]) in network), None)


def bindable(address: str, wanted: str, addresses: Sequence[Route]) -> str:
    """Return the address of this host to listen at: that of the interface or network `wanted`, else `address` itself.

    A name stands for those of our addresses that it resolves to. "" - every address - where this host has none of it,
    as behind a translated address.
    """
    if wanted:
        chosen = choose(addresses, wanted)
        return chosen[1] if chosen is not None else LOOPBACK  # the caller refuses what nobody can reach
    own = {each for _, each in addresses}
    try:
        found = [str(entry[4][0]) for entry in socket.getaddrinfo(address, None, socket.AF_INET)] if address else []
    except (OSError, UnicodeError):
        found = []
    if address.startswith("127."):
        return address
    return next((each for each in found if each in own), "")


def _ipv4() -> list[Route]:
    """List every IPv4 address with its interface, the second ones of an interface too."""
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
    """List every IPv6 address with its interface; none where the kernel has no IPv6."""
    try:
        lines = INET6.read_text().splitlines()
    except OSError:
        return []
    rows = [line.split() for line in lines]
    return [(row[5], socket.inet_ntop(socket.AF_INET6, bytes.fromhex(row[0]))) for row in rows]
