"""Find in /proc the ranks of a `command:` job that have connected to the store, which their programs do not report.

A rank has arrived when a process in its process tree has a TCP connection to the master port (proc(5), /proc/net/tcp).
"""

from collections.abc import Mapping
from pathlib import Path

from muster.jobs.machine import linux, procfs


def connected(ranks: Mapping[int, int], port: int) -> set[int]:
    """Return the ranks that have a connection to a port. `ranks`: {rank: pid}."""
    sockets = {
        f"socket:[{inode}]" for _, to, state, inode in procfs.tcp() if state == procfs.ESTABLISHED and to == port
    }
    if not sockets:
        return set()
    children = linux.all_children()
    trees = {rank: (pid, *linux.descendants(pid, children=children)) for rank, pid in ranks.items()}
    return {rank for rank, tree in trees.items() if any(_holds(each, sockets) for each in tree)}


def _holds(pid: int, sockets: set[str]) -> bool:
    try:
        return any(str(entry.readlink()) in sockets for entry in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:  # the process has ended in the meantime
        return False
