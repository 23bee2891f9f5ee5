"""Start a run by hand: the user pastes one line on each node, in any order. All agents connect to node 0.

    node 0   cd WORKDIR && MUSTER_SECRET=… python -I …/launch/boot.py launch.cli run JOB --on hand --port 61234 …
    node 2                 MUSTER_KEY=…    python -I …/launch/boot.py launch.agent --node 2 --connect 10.10.1.1:61234 …

Node 0's line starts the supervisor and an agent. Lines of different calls do not work together, because each call draws
a new secret and port. Node 0's line contains the secret. Every other line contains its node's key, which is derived
from the secret, so no node can impersonate another. Both are passed in the environment, which a node's other users
cannot read.
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
from muster.jobs.basics.handshake import new_secret, node_key
from muster.jobs.hosts import nodelist
from muster.jobs.machine import network
from muster.launch.submit.prepare import PreparedSubmission
from muster.launch.transports.base import LEASE_S
from muster.launch.wire.keys import KEY, SECRET

FIRST_PORT: Final = 61_000  # above the ports that the kernel assigns
PORTS: Final = 4536
DIAL_S: Final = 600  # time to paste the other lines


def by_hand(prepared: PreparedSubmission) -> PreparedSubmission:
    """Use the port and secret of the pasted line. If it lacks them, draw them and print the other nodes' lines."""
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


def lines(prepared: PreparedSubmission, job_words: list[str], secret: str, program: Sequence[str] = ()) -> list[str]:
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
            "the address at which the other nodes reach node 0 is not known; give --master-addr ADDRESS, or hosts "
            f"with addresses (-H FILE, --manifest FILE); this machine has {own}"
        )
    port = route.port or any_port()
    words = [*module_argv(context.python, "muster.launch.cli", context.code), "run", *job_words]
    words += ["--on", "hand", "--port", str(port), "--master-addr", address, "--runs", str(context.run.path.parent)]
    words += ["--iface", route.iface] if route.iface else []
    if route.hosts.hosts:
        words += ["--nodelist", nodelist.fold(node.host for node in context.run_nodes)]
    words += ["--", *program] if program else []
    found = [f"{shlex.join(['cd', context.workdir])} && {SECRET}={secret} {shlex.join(words)}"]
    for node in range(1, len(context.run_nodes)):
        agent = [*module_argv(context.python, "muster.launch.agent", context.code), "--node", str(node)]
        agent += ["--connect", f"{address}:{port}", "--dial-timeout-s", str(DIAL_S), "--lease-s", str(LEASE_S)]
        found.append(f"{KEY}={node_key(secret, node)} {shlex.join([*agent, '--end-as', 'run'])}")
    return found


def labelled(prepared: PreparedSubmission, lines: Sequence[str], first: int = 0) -> str:
    """Put a comment with the node's number and host above each line. `first`: the node of the first line."""
    nodes = prepared.context.run_nodes[first:]
    return "\n".join(
        f"# node {number} ({node.host})\n{line}"
        for number, (node, line) in enumerate(zip(nodes, lines, strict=True), start=first)
    )
