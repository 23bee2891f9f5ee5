"""Choose ports that stay free: outside the ephemeral range, and bound before their number is announced.

The kernel takes the local ports of outgoing connections from its ephemeral range, and may take a port there before a
program listens on it. Checking whether a port is free would be a race, too, so ports are bound at once.
"""

import random
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Final

LOWEST: Final = 20_000  # lower port numbers are often registered for services
HIGHEST: Final = 65_535
TRIES: Final = 64
EPHEMERAL: Final = (32_768, 60_999)  # Linux's default
KERNEL: Final = Path("/proc/sys/net/ipv4")


def candidates(ephemeral: tuple[int, int], reserved: Sequence[tuple[int, int]]) -> list[int]:
    """List the ports from LOWEST up that are neither ephemeral nor reserved by the administrator."""
    free = set(range(LOWEST, HIGHEST + 1))
    for first, last in (ephemeral, *reserved):
        free.difference_update(range(first, last + 1))
    return sorted(free)


def kernel_ranges() -> tuple[tuple[int, int], list[tuple[int, int]]]:
    """Return this host's ephemeral range and its reserved ports (`8080,9000-9010`)."""
    try:
        low, high = (KERNEL / "ip_local_port_range").read_text().split()
        reserved = (KERNEL / "ip_local_reserved_ports").read_text().strip()
    except OSError:
        return EPHEMERAL, []
    ranges = [item.partition("-") for item in reserved.split(",") if item]
    return (int(low), int(high)), [(int(first), int(last or first)) for first, _, last in ranges]


def bind(address: str, *, backlog: int) -> socket.socket:
    """Return a socket that listens on a free port at `address`; "" means every address of this host."""
    ports = candidates(*kernel_ranges())
    for port in random.SystemRandom().sample(ports, min(TRIES, len(ports))):
        try:
            return socket.create_server((address, port), backlog=backlog)
        except OSError:  # the port is taken: try the next one
            continue
    return socket.create_server((address, 0), backlog=backlog)  # fall back to an ephemeral port
