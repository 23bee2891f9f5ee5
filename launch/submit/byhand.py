"""A start by hand: one line per node, pasted in any order. Node 0's line is supervisor and agent; the others dial it.

    node 0   cd WORKDIR && MUSTER_SECRET=… python -I …/launch/boot.py launch.cli run JOB --on hand --port 61234 …
    node 2                 MUSTER_KEY=…    python -I …/launch/boot.py launch.agent --node 2 --connect 10.10.1.1:61234 …

The lines of one call belong together: every call draws a new secret and a port. Node 0's line contains the secret.
Every other line contains its node's key, which is derived from the secret, so no node can impersonate another. Both are
passed in the environment, which other users of a node cannot read.
"""

import os
import secrets
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from muster.jobs.basics.boot import module_argv
from muster.jobs.basics.errors import UsageError
from muster.jobs.hosts import nodelist
from muster.jobs.machine import network
from muster.launch.submit.prepare import Prepared
from muster.launch.transports.base import LEASE_S
from muster.launch.wire.handshake import new_secret, node_key
from muster.launch.wire.keys import KEY, SECRET

FIRST_PORT: Final = 61_000  # above the ports that the kernel assigns
PORTS: Final = 4536
DIAL_S: Final = 600  # for people to paste the other lines


def by_hand(prepared: Prepared) -> Prepared:
    """Take port and secret from the pasted line. Without a secret, draw both and print the lines of the other nodes."""
    given = os.environ.pop(SECRET, "")
    route = replace(prepared.route, secret=given or new_secret(), port=prepared.route.port or any_port())
    prepared = replace(prepared, submission=replace(prepared.submission, route=route))
    if not given:
        print("paste on the other nodes, in any order:", file=sys.stderr)
        print(labelled(prepared, lines(prepared, [], route.secret)[1:], first=1), file=sys.stderr)
    return prepared


def any_port() -> int:
    """Return a random port for the supervisor."""
    return FIRST_PORT + secrets.randbelow(PORTS)


def lines(prepared: Prepared, job_words: list[str], secret: str, program: Sequence[str] = ()) -> list[str]:
    """Return one line per node of the run, spares included.

    `job_words`: the job file, and the options that change it, for node 0. `program`: appended to node 0's line, in
    place of a job file.

    Raises:
        UsageError: if no address of node 0 is known.
    """
    context, route = prepared.context, prepared.route
    address = context.placement.master_addr
    if not address:
        own = ", ".join(each for _, each in network.own_addresses()) or "none but loopback"
        raise UsageError(
            "the address at which the other nodes find node 0 is not known; give --master-addr ADDRESS, or hosts "
            f"with addresses (-H FILE, --manifest FILE); this machine has {own}"
        )
    port = route.port or any_port()
    words = [*module_argv(context.python, "muster.launch.cli", context.code), "run", *job_words]
    words += ["--on", "hand", "--port", str(port), "--master-addr", address, "--runs", str(context.run.path.parent)]
    words += ["--iface", route.iface] if route.iface else []
    if route.hosts.hosts:
        words += ["--nodelist", nodelist.fold(node.host for node in context.crew)]
    words += ["--", *program] if program else []
    found = [f"{shlex.join(['cd', context.workdir])} && {SECRET}={secret} {shlex.join(words)}"]
    for node in range(1, len(context.crew)):
        agent = [*module_argv(context.python, "muster.launch.agent", context.code), "--node", str(node)]
        agent += ["--connect", f"{address}:{port}", "--dial-timeout-s", str(DIAL_S), "--lease-s", str(LEASE_S)]
        found.append(f"{KEY}={node_key(secret, node)} {shlex.join([*agent, '--end-as', 'run'])}")
    return found


def labelled(prepared: Prepared, lines: Sequence[str], first: int = 0) -> str:
    """Put a comment above each line with the node that it is for; `first`: the node of the first line."""
    nodes = prepared.context.crew[first:]
    return "\n".join(
        f"# node {number} ({node.host})\n{line}"
        for number, (node, line) in enumerate(zip(nodes, lines, strict=True), start=first)
    )
