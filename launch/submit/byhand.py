"""A start by hand: one line per node, pasted in any order. Node 0's is supervisor and agent; the others dial it.

    node 0   cd WORKDIR && MUSTER_TOKEN=… python -I …/launch/boot.py launch.cli run JOB --on hand --port 61234 …
    node 2                 MUSTER_TOKEN=… python -I …/launch/boot.py launch.agent --node 2 --connect 10.10.1.1:61234 …

All lines of a job must agree on port and token, also when they are printed one by one, so both follow from the job and
from a secret of the user's. The token stands in the environment, which other users of a node cannot read.
"""

import hashlib
import hmac
import json
import os
import secrets
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Final

from jobs import nodelist
from jobs.boot import module_argv
from jobs.errors import UsageError
from jobs.files import folder_error, write_secret
from launch.agent import TOKEN
from launch.submit.prepare import Prepared
from launch.transports.base import LEASE_S

FIRST_PORT: Final = 61_000  # behind the ports that the kernel hands out
PORTS: Final = 4536
DIAL_S: Final = 600  # for people to paste the other lines


def secret(environ: "os._Environ[str]" = os.environ) -> str:
    """Return the user's secret; it is made on first use.

    Raises:
        RunFolderError, StorageError: it cannot be written.
    """
    configured = Path(environ.get("XDG_CONFIG_HOME", ""))
    folder = (configured if configured.is_absolute() else Path.home() / ".config") / "muster"
    path = folder / "secret"
    try:
        return path.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        pass
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise folder_error(folder, error) from error
    made = secrets.token_urlsafe(24)
    write_secret(path, made + "\n")
    return made


def token_of(prepared: Prepared) -> str:
    """Return the token of all lines of a job: the same for the same job, hosts and user."""
    context = prepared.context
    spares = [asdict(node) for node in context.spares]
    what = json.dumps([prepared.job_text, context.placement.to_json(), *spares, context.workdir])
    return hmac.new(secret().encode(), what.encode(), hashlib.sha256).hexdigest()[:32]


def port_of(token: str, given: int) -> int:
    """Return the supervisor's port: the given one, or one that follows from the token."""
    return given or FIRST_PORT + int(token[:8], 16) % PORTS


def lines(prepared: Prepared, job_words: list[str]) -> list[str]:
    """Return one line per node of the crew; `job_words` are the job file and the options that change it, for node 0.

    Raises:
        UsageError: nothing says where the others find node 0.
    """
    context, route = prepared.context, prepared.submission.route
    address = context.placement.master_addr
    if not address:
        raise UsageError(
            "where the other nodes find node 0 is not known; give --master-addr ADDRESS, or hosts with addresses "
            "(-H FILE, --manifest FILE)"
        )
    token = token_of(prepared)
    port = port_of(token, route.port)
    variable = f"{TOKEN}={token}"
    words = [*module_argv(context.python, "launch.cli", context.code), "run", *job_words]
    words += ["--on", "hand", "--port", str(port), "--master-addr", address, "--runs", str(context.run.path.parent)]
    if route.hosts.hosts:
        words += ["--nodelist", nodelist.fold(node.host for node in context.crew)]
    found = [f"{shlex.join(['cd', context.workdir])} && {variable} {shlex.join(words)}"]
    for node in range(1, len(context.crew)):
        agent = [*module_argv(context.python, "launch.agent", context.code), "--node", str(node)]
        agent += ["--connect", f"{address}:{port}", "--dial-timeout-s", str(DIAL_S), "--lease-s", str(LEASE_S)]
        found.append(f"{variable} {shlex.join([*agent, '--end-as', 'run'])}")
    return found
