"""The warm process: one per host. torch is imported once; every rank of the host is a fork of the importing process.

    warm ── keeper of node 0 ── rank 0, rank 1, store
         └─ keeper of node 1 ── rank 2, rank 3             (pretend nodes share one warm process)

It is given one socket per agent and forks one keeper for each. With several keepers it imports torch itself, before it
forks them. A single keeper imports torch instead, and the warm process stays small: schedulers that add up the RSS of
all processes count every page again in each fork. Nobody runs a torch operation or asks anything of CUDA before ranks,
for a child of a process that did either hangs. Its own start carries the run id and the library variables, so that
they stand in /proc/PID/environ of every rank. It ends when its last keeper has ended; a keeper ends with its agent.
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
from muster.jobs.node.keeper import Keeper

HEARD_S: Final = 1.0  # that an agent is given to read why there will be no keeper


def main() -> None:
    """Import what ranks need, fork the keepers, and bury what a killed keeper leaves behind."""
    parser = argparse.ArgumentParser(description="internal: started by the agent or the local transport")
    parser.add_argument("--fds", required=True, help="one inherited socket per agent, comma-separated")
    parser.add_argument("--preload", default="", help="modules to import before the forks, comma-separated")
    args = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the supervisor's to answer
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # "save now", for ranks of ours the agent's to answer
    if linux.has_scheduler():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it goes to every process of the job; the agent answers it
    linux.adopt_orphans()
    sockets = [socket.socket(fileno=int(text)) for text in args.fds.split(",")]
    if is_of_job():
        for each in sockets:  # so that an agent can tell a Python that cannot run this from a process that was killed
            each.sendall((json.dumps({"begun": os.getpid()}) + "\n").encode())
    modules, warm, keepers = list(filter(None, args.preload.split(","))), os.getpid(), set()
    if len(sockets) > 1:
        preload(modules, sockets)
    for mine in sockets:
        pid = os.fork()
        if pid == 0:
            for other in sockets:
                if other is not mine:
                    other.close()
            if len(sockets) == 1:
                linux.die_with_parent(warm)  # the agent may give up an import that hangs, by killing the warm process
                preload(modules, sockets)
                linux.die_with_parent(warm, 0)  # a keeper at work outlives it, and ends with its agent
            Keeper(mine).run()
        keepers.add(pid)
    for each in sockets:
        each.close()
    bury(keepers)


def preload(modules: list[str], sockets: list[socket.socket]) -> None:
    """Import what ranks need; a module that cannot be imported is told to every agent, and ends this process."""
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
                while each.recv(1 << 16):  # until the agent has heard: unread orders would reset the connection
                    pass
        sys.exit(exits.REFUSED)
    gc.collect()
    gc.freeze()  # what is imported stays shared between the forks


def is_of_job() -> bool:
    """Return whether this is a job's own Python: Muster's runs with -I (launch/boot.py)."""
    return not sys.flags.isolated


def advice() -> str:
    """Return what to do about a failed import."""
    if not is_of_job():
        return "run ./setup.sh, or name an interpreter that has it in the site file"
    torch = sys.modules.get("torch")
    found = f"its torch is {torch.__version__}; install another one" if torch else "install torch for this Python"
    return f"{found}, or name another Python with python in the job file"


def bury(keepers: set[int]) -> None:
    """Wait for the keepers; whatever else becomes our child has lost its keeper and is killed, to the last one."""
    while keepers | (orphans := set(linux.descendants(os.getpid(), leave=keepers))):
        for orphan in orphans:
            linux.kill_quietly(orphan, signal.SIGKILL)
        pid, _ = os.wait()
        keepers.discard(pid)


if __name__ == "__main__":
    main()
