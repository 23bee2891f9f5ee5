"""The store of an attempt: a separate process on node 0, so that no rank has to serve it.

The agent binds the store's socket before anything else starts. Early connections of ranks wait in its backlog. For jobs
that run programs, the store loads only the C++ part of torch, which takes 0.35 s of CPU time instead of 1.7 s, and only
when a program loads it too: the others never ask for the 150 MB of a store.
"""

import argparse
import os
import select
import signal
import socket
import sys
from contextlib import suppress
from datetime import timedelta
from importlib import machinery, util
from pathlib import Path
from types import ModuleType
from typing import Any, Final

STORE_TIMEOUT_S = 300.0
BINDINGS: Final = "torch._C"
LIBRARY: Final = Path("lib", "libtorch_cpu.so")


def serve(listening: socket.socket, store_class: Any = None) -> None:
    """Serve a c10d TCPStore on a listening socket until this process is killed. `store_class` defaults to torch's."""
    if store_class is None:
        from torch.distributed import TCPStore as store_class  # type: ignore[attr-defined]
    address, port = listening.getsockname()[:2]
    store = store_class(
        "127.0.0.1" if address == "0.0.0.0" else address,  # this process also connects to its own server
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=STORE_TIMEOUT_S),
        master_listen_fd=listening.detach(),
    )
    while store is not None:  # keep the store object, and thus the server, alive
        signal.pause()


def bare() -> Any:
    """Load the class TCPStore, but not most of torch's Python modules, which this process then cannot import.

    Raises:
        Exception: of any kind, if the C++ part of this torch version needs more Python modules.
    """
    package = util.find_spec("torch")
    found = package and machinery.PathFinder.find_spec(BINDINGS, package.submodule_search_locations)
    if package is None or found is None or found.loader is None:
        raise ImportError(f"{sys.executable} has no {BINDINGS}")
    sys.modules["torch"] = util.module_from_spec(package)  # an empty module
    sys.modules["torch.distributed"] = ModuleType("torch.distributed")  # imported by _c10d_init
    bindings = sys.modules[BINDINGS] = util.module_from_spec(found)
    found.loader.exec_module(bindings)
    bindings._c10d_init()
    return bindings._distributed_c10d.TCPStore


def await_torch(descriptor: int) -> None:
    """Wait until a process of this machine opens torch's library, or a rank connects to the socket."""
    from muster.jobs.machine import linux

    awaited = [descriptor]
    package = util.find_spec("torch")
    for folder in () if package is None else package.submodule_search_locations or ():
        with suppress(OSError):  # no such file, or the user has too many watches: ranks that connect wait a little
            awaited.append(linux.openings(Path(folder, LIBRARY)))
    select.select(awaited, [], [])
    for watch in awaited[1:]:
        os.close(watch)


def main() -> None:
    """Serve on an inherited descriptor, for jobs whose rank parent has no torch."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--whole", action="store_true", help="import all of torch")
    args = parser.parse_args()
    from muster.jobs.machine import linux

    linux.die_with_parent(args.parent)
    if not args.whole:
        await_torch(args.fd)
    try:
        store_class = None if args.whole else bare()
    except Exception:  # start again in a fresh interpreter, and import all of torch
        os.execv(sys.executable, [*sys.orig_argv, "--whole"])
    os.set_inheritable(args.fd, False)
    serve(socket.socket(fileno=args.fd), store_class)


if __name__ == "__main__":
    main()
