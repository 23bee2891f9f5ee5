"""Start nodes: create links, files and the first process, and wait until their services answer."""

import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from muster.cloudlab.box import kernel, network, slurm, texts
from muster.cloudlab.box.machine import filters_bridges
from muster.cloudlab.box.paths import NETNS, BoxPaths
from muster.cloudlab.box.plan import node_plan
from muster.cloudlab.box.processes import Identity, is_listening, read_identity, wait_until
from muster.cloudlab.box.spec import HEAD
from muster.cloudlab.box.state import BoxState
from muster.cloudlab.box.tools import Tools, wait_all
from muster.jobs.basics.boot import module_argv
from muster.jobs.basics.errors import RefusedError
from muster.jobs.basics.reading import read_end

READY: Final = b"ready\n"
GO: Final = b"go\n"
START_S: Final = 30.0
SLURM_S: Final = 60.0
SLURM_POLL_S: Final = 0.05
SSH_PORT: Final = 22
REACH_S: Final = 5.0
LAST_LINES: Final = 3
LAST_BYTES: Final = 1 << 14


@dataclass(frozen=True)
class Starting:
    """A node whose first process waits for the go-ahead."""

    node: str
    process: subprocess.Popen[bytes]


def make_links(state: BoxState, nodes: Sequence[str], tools: Tools, *, bridge: bool) -> None:
    """Create the namespaces and shaped links of nodes. With `bridge`, create the bridge first.

    Raises:
        RefusedError: if a program failed.
    """
    spec = state.spec
    lines = network.bridge_lines(spec) if bridge else []
    lines += [line for node in nodes for line in network.node_lines(spec, node)]
    tools.batches([(["ip"], lines)])
    tools.batches([(["ip", "-n", spec.netns(node)], network.inner_lines(spec, node)) for node in nodes])
    shape(state, nodes, tools)


def shape(state: BoxState, nodes: Sequence[str], tools: Tools) -> None:
    """Set the speed of links according to the state.

    Raises:
        RefusedError: if `tc` failed.
    """
    spec, rates = state.spec, state.rates
    work: list[tuple[Sequence[str], Sequence[str]]] = [(["tc"], network.host_shaping(spec, nodes, rates))]
    work += [(["tc", "-n", spec.netns(node)], network.node_shaping(spec, node, rates)) for node in nodes]
    tools.batches(work)


def make_folders(state: BoxState, nodes: Iterable[str], tools: Tools) -> None:
    """Create the nodes' folders and their initial files; existing host keys are kept.

    Raises:
        RefusedError: if `ssh-keygen` failed.
    """
    spec, paths = state.spec, BoxPaths.of(state.spec.name)
    users = Path("/etc/passwd").read_text(encoding="utf-8", errors="surrogateescape")
    keys = []
    for node in nodes:
        own = paths.node(node)
        for folder in (own.spool, own.runs, own.home / ".ssh"):
            folder.mkdir(parents=True, exist_ok=True)
        own.home.chmod(0o700)
        config = own.home / ".ssh" / "config"
        config.write_text(texts.ssh_config(spec, paths), encoding="utf-8")
        config.chmod(0o600)
        own.passwd.write_text(texts.passwd(users, str(own.home)), encoding="utf-8", errors="surrogateescape")
        if not own.host_key.exists():
            keys.append(tools.start(texts.keygen_argv(str(own.host_key), node)))
    wait_all(keys)


def start_nodes(state: BoxState, nodes: Sequence[str], tools: Tools, *, anew: bool) -> None:
    """Start the first processes of nodes and wait until their sshd and Slurm daemons answer.

    Raises:
        RefusedError: if a node did not start in time; the message has the last lines of its log.
    """
    starting = [_start(state, node, tools, anew=anew) for node in nodes]
    try:
        deadline = time.monotonic() + START_S
        for each in starting:
            _await_ready(each, state, deadline)
        # The controller starts first, because a slurmd that does not find it waits a second before it retries.
        for each in starting:
            if each.node == HEAD:
                _answer(each)
                await_listening(state, [HEAD], slurm.CTLD_PORT)
        for each in starting:
            if each.node != HEAD:
                _answer(each)
    finally:
        for each in starting:
            _forget(each)
    await_listening(state, nodes, SSH_PORT)


def await_listening(state: BoxState, nodes: Iterable[str], port: int, timeout_s: float = START_S) -> None:
    """Wait until a process listens on a port in each of the nodes.

    Raises:
        RefusedError: if no process of a node listens in time, or a node has ended.
    """
    deadline = time.monotonic() + timeout_s
    for node in nodes:
        init = living(state, node)

        def answers(node: str = node, init: Identity = init) -> bool:
            if not init.is_alive:
                raise _died(state, node)
            return is_listening(init.pid, port)

        if not wait_until(answers, deadline - time.monotonic()):
            service = "sshd" if port == SSH_PORT else "slurmctld"
            raise RefusedError(
                f"{node}: {service} is not listening after {timeout_s:.0f} s{_log_end(state, node, service)}"
            )


def check_reach(state: BoxState) -> None:
    """Connect from the first node to the last, to test the bridge between them.

    Raises:
        RefusedError: if the connection fails; the host's firewall may block it.
    """
    first, last = state.spec.members[0], state.spec.members[-1]

    def connect() -> None:
        kernel.enter_network(NETNS / state.spec.netns(first))  # this affects only the current thread
        socket.create_connection((state.spec.address(last), SSH_PORT), timeout=REACH_S).close()

    with ThreadPoolExecutor(max_workers=1) as pool:
        error = pool.submit(connect).exception()
    if error is not None:
        hint = "; this machine's firewall filters bridges; try: sysctl net.bridge.bridge-nf-call-iptables=0"
        raise RefusedError(
            f"{first} cannot reach {last} over this machine's bridge ({error}){hint if filters_bridges() else ''}"
        )


def await_idle(state: BoxState, nodes: Sequence[str], tools: Tools, *, state_is: Callable[[str], bool]) -> None:
    """Wait until Slurm reports the desired state for all nodes.

    Raises:
        RefusedError: if Slurm does not report it in time.
    """
    seen: dict[str, str] = {}

    def good() -> bool:
        seen.clear()
        seen.update(slurm_states(tools))
        return all(state_is(seen.get(node, "")) for node in nodes)

    if not wait_until(good, SLURM_S, SLURM_POLL_S):
        wrong = [node for node in nodes if not state_is(seen.get(node, ""))]
        bad = ", ".join(f"{node} is {seen.get(node, 'unknown')}" for node in wrong)
        raise RefusedError(f"Slurm is not ready after {SLURM_S:.0f} s: {bad}{_log_end(state, wrong[0], 'slurmd')}")


def slurm_states(tools: Tools) -> dict[str, str]:
    """Return the states of nodes from Slurm's controller, such as idle, idle* (silent), mixed, down.

    Raises:
        RefusedError: if the controller does not answer.
    """
    lines = tools.run(["sinfo", "--noheader", "--Node", "--format=%N %T"]).splitlines()
    return {fields[0]: fields[1] for line in lines if len(fields := line.split()) == 2}


def slurm_tools(state: BoxState, lock: int = -1) -> Tools:
    """Return tools whose Slurm commands use the box's controller."""
    return Tools(state.programs, lock, {"SLURM_CONF": str(BoxPaths.of(state.spec.name).slurm_conf)})


def living(state: BoxState, node: str) -> Identity:
    """Return the first process of a node.

    Raises:
        RefusedError: if the node is not running.
    """
    found = identity_of(state, node)
    if found is None:
        raise _died(state, node)
    return found


def identity_of(state: BoxState, node: str) -> Identity | None:
    """Return the first process of a node, or None if it is not running."""
    found = read_identity(BoxPaths.of(state.spec.name).node(node).init)
    return found if found is not None and not state.is_stale and found.is_alive else None


def _start(state: BoxState, node: str, tools: Tools, *, anew: bool) -> Starting:
    spec, paths = state.spec, BoxPaths.of(state.spec.name)
    own = paths.node(node)
    own.init.unlink(missing_ok=True)
    plan = node_plan(spec, paths, node, state.programs, anew=anew, faketime=state.faketime)
    own.plan.write_text(plan.to_json(), encoding="utf-8")
    argv = [*module_argv(sys.executable, "muster.cloudlab.box.init"), str(own.plan), *map(str, tools.held)]
    with own.log("init").open("ab") as log:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            cwd="/",
            start_new_session=True,
            pass_fds=tools.held,
        )
    return Starting(node, process)


def _await_ready(starting: Starting, state: BoxState, deadline: float) -> None:
    stdout = starting.process.stdout
    assert stdout is not None
    left = max(0.0, deadline - time.monotonic())
    said = os.read(stdout.fileno(), len(READY)) if select.select([stdout], [], [], left)[0] else b""
    if said != READY:
        raise RefusedError(f"{starting.node} did not start{_log_end(state, starting.node, 'init')}")


def _answer(starting: Starting) -> None:
    assert starting.process.stdin is not None
    os.write(starting.process.stdin.fileno(), GO)


def _forget(starting: Starting) -> None:
    """Close this side of the pipes. Nodes that have received "go" stay alive; all other nodes end."""
    for pipe in (starting.process.stdin, starting.process.stdout):
        assert pipe is not None
        pipe.close()
    starting.process.wait(START_S)


def _died(state: BoxState, node: str) -> RefusedError:
    return RefusedError(f"{node} of the box {state.spec.name} is not running{_log_end(state, node, 'init')}")


def _log_end(state: BoxState, node: str, service: str) -> str:
    """Return the last lines of a log, for the end of a message."""
    path = BoxPaths.of(state.spec.name).node(node).log(service)
    try:
        lines = read_end(path, LAST_BYTES).decode(errors="replace").splitlines()[-LAST_LINES:]
    except FileNotFoundError:
        return ""
    return f"; its log of {service} ends with: {' / '.join(lines)}" if lines else ""
