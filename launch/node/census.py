"""Which ranks of a `command:` job have reached the store: read from the kernel, since the program tells us nothing.

A rank has arrived when a process of its tree has a TCP connection to the master port (proc(5), /proc/net/tcp).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from muster.jobs.machine import linux

ESTABLISHED: Final = "01"


def connected(ranks: Mapping[int, int], port: int) -> set[int]:
    """Return the ranks, of {rank: pid}, that hold a connection to a port."""
    sockets = {f"socket:[{inode}]" for inode in _inodes(port)}
    if not sockets:
        return set()
    children = linux.all_children()
    trees = {rank: (pid, *linux.descendants(pid, children=children)) for rank, pid in ranks.items()}
    return {rank for rank, tree in trees.items() if any(_holds(each, sockets) for each in tree)}


def _inodes(port: int) -> set[str]:
    found = set()
    for table in ("tcp", "tcp6"):
        try:
            lines = Path("/proc/net", table).read_text().splitlines()[1:]
        except FileNotFoundError:  # a kernel without IPv6
            continue
        for line in lines:
            fields = line.split()
            remote, state, inode = fields[2], fields[3], fields[9]
            if state == ESTABLISHED and int(remote.rpartition(":")[2], 16) == port:
                found.add(inode)
    return found


def _holds(pid: int, sockets: set[str]) -> bool:
    try:
        return any(str(entry.readlink()) in sockets for entry in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:  # it ended while we looked
        return False
