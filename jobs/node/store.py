"""The store of an attempt: a process of its own on node 0, so that no rank is special.

Its socket is bound by the agent before anything else starts; ranks that dial early wait in the socket's backlog.
"""

import argparse
import os
import signal
import socket
from datetime import timedelta

STORE_TIMEOUT_S = 300.0


def serve(listening: socket.socket) -> None:
    """Serve a c10d TCPStore on a listening socket until this process is killed."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    address, port = listening.getsockname()[:2]
    store = TCPStore(
        "127.0.0.1" if address == "0.0.0.0" else address,  # this process is a client of its own, too
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=STORE_TIMEOUT_S),
        master_listen_fd=listening.detach(),
    )
    while store is not None:  # also keeps the server alive: it ends with the object
        signal.pause()


def main() -> None:
    """Serve on an inherited descriptor: for jobs whose keeper has no torch."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    args = parser.parse_args()
    from muster.jobs.machine import linux

    linux.die_with_parent(args.parent)
    os.set_inheritable(args.fd, False)
    serve(socket.socket(fileno=args.fd))


if __name__ == "__main__":
    main()
