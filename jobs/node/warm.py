"""The warm process of a host, which imports torch once. Every rank of the host is a fork that shares the import.

    warm ── rank parent of node 0 ── rank 0, rank 1, store
         └─ rank parent of node 1 ── rank 2, rank 3        (pretend nodes share one warm process)

The warm process receives one socket per agent and forks one rank parent for each. With several agents, it imports torch
before the forks. With one agent, the rank parent imports torch itself and the warm process stays small, because some
schedulers add up the RSS of all processes and thus count shared pages once per process. No process runs a torch
operation or queries CUDA before the ranks are forked, because a child of such a process hangs. The environment of the
warm process contains the run id and the library variables, so that /proc/PID/environ of every rank shows them. The warm
process ends after its last rank parent, and a rank parent ends with its agent.
"""

import argparse
import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import sys
from typing import Final

from muster.jobs.basics import exits
from muster.jobs.machine import linux
from muster.jobs.node.rank_parent import RankParent

HEARD_S: Final = 1.0  # time for an agent to read why an import failed


def main() -> None:
    """Import the ranks' modules, fork the rank parents, and kill processes that a killed rank parent leaves behind."""
    parser = argparse.ArgumentParser(description="internal: started by the agent or the local transport")
    parser.add_argument("--fds", required=True, help="one inherited socket per agent, comma-separated")
    parser.add_argument("--preload", default="", help="modules to import before the forks, comma-separated")
    args = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor handles Ctrl-C
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # "save now": the agent handles it
    if linux.has_scheduler():
        # Slurm sends SIGTERM to every process of the job; the agent handles it
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    linux.adopt_orphans()
    sockets = [socket.socket(fileno=int(text)) for text in args.fds.split(",")]
    if is_of_job():
        for each in sockets:  # shows the agent that this Python can run Muster
            each.sendall((json.dumps({"begun": os.getpid()}) + "\n").encode())
    modules, warm, rank_parents = list(filter(None, args.preload.split(","))), os.getpid(), set()
    if len(sockets) > 1:
        preload(modules, sockets)
    for mine in sockets:
        pid = os.fork()
        if pid == 0:
            for other in sockets:
                if other is not mine:
                    other.close()
            if len(sockets) == 1:
                linux.die_with_parent(warm)  # the agent kills the warm process if the import hangs
                preload(modules, sockets)
                linux.die_with_parent(warm, 0)  # from now on it ends with its agent, not with the warm process
            RankParent(mine).run()
        rank_parents.add(pid)
    for each in sockets:
        each.close()
    bury(rank_parents)


def preload(modules: list[str], sockets: list[socket.socket]) -> None:
    """Import the modules that ranks need. If an import fails, report that to every agent and end this process."""
    gc.disable()  # imports leave little garbage behind, and a tenth of their time would be spent looking for it
    try:
        for module in modules:
            importlib.import_module(module)
    except Exception as error:  # a broken torch raises OSError or RuntimeError as well
        broken = f"{sys.executable}: {error}; {advice()}"
        for each in sockets:
            each.sendall((json.dumps({"broken": broken, "code": exits.REFUSED}) + "\n").encode())
            each.shutdown(socket.SHUT_WR)
            each.settimeout(HEARD_S)
        for each in sockets:
            with contextlib.suppress(OSError):
                while each.recv(1 << 16):  # drain the agent's orders: if unread, closing resets the connection
                    pass
        sys.exit(exits.REFUSED)
    gc.collect()
    gc.freeze()  # keep the imported pages shared between the forks
    gc.enable()


def is_of_job() -> bool:
    """Return True if this is a job's own Python. Muster's own Python runs with -I (launch/boot.py)."""
    return not sys.flags.isolated


def advice() -> str:
    """Return advice about a failed import."""
    if not is_of_job():
        return "run ./setup.sh, or name a Python that has the module in the site file"
    torch = sys.modules.get("torch")
    found = f"install a torch other than {torch.__version__}" if torch else "install torch for this Python"
    return f"{found}, or set python in the job file to another Python"


def bury(rank_parents: set[int]) -> None:
    """Wait for the rank parents. Kill any other child, because its rank parent is gone."""
    while rank_parents | (orphans := set(linux.descendants(os.getpid(), leave=rank_parents))):
        for orphan in orphans:
            linux.kill_quietly(orphan, signal.SIGKILL)
        pid, _ = os.wait()
        rank_parents.discard(pid)


if __name__ == "__main__":
    main()
