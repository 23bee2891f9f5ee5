"""Nodes of a real box fail and are healed; each way looks to the peers as it should."""

import selectors
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from muster.cloudlab.box import nodes
from muster.cloudlab.box.control import Box, box_up
from muster.cloudlab.box.failures import WAYS
from muster.cloudlab.box.processes import wait_until
from muster.cloudlab.box.spec import BoxSpec
from muster.cloudlab.box.status import NodeStatus
from muster.jobs.basics.errors import RefusedError
from support.boxes import leftovers, processes, ssh

pytestmark = [pytest.mark.command, pytest.mark.cluster]

# A server that says hello to whoever comes and then echoes; it runs in a node.
ECHO = """
import socket
server = socket.create_server(('', 0))  # the last test's server may still be ending
print(server.getsockname()[1], flush=True)
while True:
    peer = server.accept()[0]
    while data := peer.recv(100):
        peer.sendall(data)
"""


def node(box: Box, name: str) -> NodeStatus:
    """Return how a node is."""
    return next(each for each in box.status().nodes if each.node == name)


@contextmanager
def connected(box: Box, name: str) -> Iterator[socket.socket]:
    """Start an echo server in a node and give a connection to it."""
    argv = box.exec_argv(name, ["python3", "-uc", ECHO])
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as server:
        port = int(server.stdout.readline())
        with socket.create_connection((box.state.spec.address(name), port), timeout=20) as connection:
            assert echo(connection, 20.0) == b"x"
            yield connection
        server.kill()


def echo(connection: socket.socket, wait_s: float = 0.5) -> bytes | None:
    """Send a byte and return what comes back: None for silence, nothing for the end of the connection."""
    try:
        connection.sendall(b"x")
        with selectors.DefaultSelector() as selector:
            selector.register(connection, selectors.EVENT_READ)
            return connection.recv(1) if selector.select(wait_s) else None
    except (ConnectionResetError, BrokenPipeError):
        return b""


@pytest.mark.parametrize(
    ("how", "state", "answer"),
    [
        ("power", "down+unplugged", None),
        ("kill", "down", b""),
        ("unplug", "unplugged", None),
        ("freeze", "frozen", None),
    ],
)
def test_each_way_of_failing_looks_as_it_should_and_is_healed(
    how: str, state: str, answer: bytes | None, breakable: Box
) -> None:
    with connected(breakable, "node2") as connection:
        breakable.fail("node2", how)
        assert node(breakable, "node2").state == state
        assert echo(connection, 0.5 if answer is None else 20.0) == answer

        breakable.heal("node2")
        assert node(breakable, "node2").state == "up"
        if how in ("unplug", "freeze"):  # the connection lives on: TCP sends again what was lost
            assert wait_until(lambda: echo(connection) == b"x", 20.0)
    assert ssh(breakable, "node2", "hostname").stdout == "node2\n"
    assert ssh(breakable, "node1", "ssh node2 hostname").stdout == "node2\n"
    breakable.heal("node2")
    assert [each.state for each in breakable.status().nodes] == ["up"] * 5


@pytest.mark.parametrize("how", ["power", "kill"])
def test_a_killed_node_takes_all_its_processes_along(how: str, breakable: Box) -> None:
    mark = f"314.{breakable.state.spec.number}"
    ssh(breakable, "node1", f"setsid nohup sleep {mark} >/dev/null 2>&1 </dev/null & sleep 0.1")
    assert any(f"sleep {mark}" in command for _, command in processes())
    breakable.fail("node1", how)
    assert not any(f"sleep {mark}" in command for _, command in processes())
    assert not any("nodes/node1/" in command and f"box-{breakable.name}/" in command for _, command in processes())


def test_an_unplugged_node_runs_on_and_is_silent_towards_the_host_too(breakable: Box, tmp_path: Path) -> None:
    counting = f"i=0; while :; do i=$((i+1)); echo $i > {tmp_path}/count; sleep 0.02; done"
    count = tmp_path / "count"
    with subprocess.Popen(breakable.exec_argv("node3", ["sh", "-c", counting])) as process:
        assert wait_until(count.exists, 5.0)
        breakable.fail("node3", "unplug")
        before = count.read_text()
        assert wait_until(lambda: count.read_text() not in ("", before), 5.0)
        gateway = breakable.state.spec.bridge_address
        with socket.create_server((gateway, 0)) as server:
            line = f"import socket; socket.create_connection(('{gateway}', {server.getsockname()[1]}), timeout=0.5)"
            out = breakable.exec("node3", ["python3", "-c", line])
        assert out.returncode == 1
        assert "TimeoutError" in out.stderr
        process.kill()


def test_a_frozen_node_does_nothing_until_it_is_healed(breakable: Box, tmp_path: Path) -> None:
    counting = f"echo $$ > {tmp_path}/pid; i=0; while :; do i=$((i+1)); echo $i > {tmp_path}/count; sleep 0.01; done"
    count = tmp_path / "count"
    ssh(breakable, "node3", f"setsid nohup sh -c '{counting}' >/dev/null 2>&1 </dev/null & sleep 0.1")
    assert wait_until(lambda: count.exists() and count.read_text() != "", 5.0)
    breakable.fail("node3", "freeze")
    before = count.read_text()
    assert not wait_until(lambda: count.read_text() != before, 0.3)
    with pytest.raises(RefusedError, match="node3 is frozen; try: sudo muster box heal node3"):
        breakable.exec("node3", ["true"])
    breakable.heal("node3")
    assert wait_until(lambda: count.read_text() not in ("", before), 5.0)
    ssh(breakable, "node3", f"kill $(cat {tmp_path}/pid)")


def test_a_dead_node_can_be_frozen_by_nobody(breakable: Box) -> None:
    breakable.fail("node1", "kill")
    with pytest.raises(RefusedError, match=r"node1 of the box .* is not running"):
        breakable.fail("node1", "freeze")
    with pytest.raises(RefusedError, match=r"node1 of the box .* is not running"):
        breakable.exec("node1", ["true"])


def test_a_node_that_starts_again_has_its_disk_and_its_keys_and_nothing_in_memory(breakable: Box) -> None:
    ssh(breakable, "node1", "echo kept > ~/kept; echo lost > /dev/shm/lost")
    breakable.fail("node1", "power")
    breakable.heal("node1")
    assert ssh(breakable, "node1", "cat ~/kept; ls /dev/shm").stdout == "kept\n"


def test_a_box_whose_nodes_do_not_reach_each_other_is_noticed(breakable: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "REACH_S", 0.3)
    nodes.check_reach(breakable.state)
    breakable.fail("node3", "unplug")
    with pytest.raises(RefusedError, match="head cannot reach node3 over this machine's bridge"):
        nodes.check_reach(breakable.state)


def test_down_takes_a_box_with_failed_nodes(new_name: Callable[[], str]) -> None:
    name = new_name()
    with box_up(BoxSpec(name=name, nodes=len(WAYS), rate=10**8)) as box:
        for number, how in enumerate(WAYS):
            box.fail(f"node{number}", how)
        number = box.state.spec.number
    assert leftovers(name, number) == []
