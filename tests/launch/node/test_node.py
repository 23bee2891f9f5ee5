"""The agent before the start of ranks: beats, the store's port, the way to the master, the run folder."""

import socket
import time
from pathlib import Path

import pytest

from muster.jobs.basics.files import write_text
from muster.jobs.machine import network
from muster.jobs.runfolder.rundir import RunDir
from muster.launch.common.fingerprint import fingerprint
from muster.launch.wire.messages import Beat, Broken, Heartbeat, Prepare, Prepared, Reach, Reached, Start
from support.agents import DEADLINE_S, LOOPBACK, Started, closed_port, port_of

pytestmark = pytest.mark.command


@pytest.fixture
def agent(start_agent) -> Started:
    """The agent of node 0, which has greeted."""
    started: Started = start_agent("--node", "0")
    started.greeted()
    return started


# Before the start -----------------------------------------------------------------------------------------------------


def test_a_beat_is_answered_with_both_times_of_this_clock(agent: Started) -> None:
    began = time.time()
    agent.send(Beat(7.25))
    answer = agent.receive()
    assert isinstance(answer, Heartbeat)
    assert answer.sent == 7.25
    assert began <= answer.heard <= answer.time <= time.time()


def test_the_port_that_it_prepares_is_bound_before_it_is_told(agent: Started) -> None:
    agent.send(Prepare(0, LOOPBACK))
    prepared = agent.receive()
    with socket.create_connection((LOOPBACK, prepared.port), timeout=DEADLINE_S):
        pass  # it waits in the backlog
    assert prepared == Prepared(0, prepared.port, LOOPBACK, tuple(network.own_addresses()))


def reach(started: Started, run: RunDir, *, port: int, iface: str = "") -> Reached:
    started.send(Reach(0, LOOPBACK, port, iface, str(run.path), "the nonce"))
    reached: Reached = started.receive()
    return reached


def test_it_tries_the_way_to_the_master_and_the_run_folder(agent: Started, listening, tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    write_text(run.nonce("supervisor"), "the nonce")
    assert reach(agent, run, port=port_of(listening)) == Reached(
        attempt=0,
        interface="lo",
        address=LOOPBACK,
        why="",
        code=fingerprint(),
        storage="shared",
        run=str(tmp_path),
        storage_why="",
    )


def test_a_master_that_cannot_be_reached_is_said_with_the_kernels_reason(agent: Started, tmp_path: Path) -> None:
    said = reach(agent, RunDir(tmp_path), port=closed_port())
    assert (said.why, said.storage) == ("Connection refused", "apart")


def test_a_network_of_the_users_choice_comes_before_the_route(agent: Started, listening, tmp_path: Path) -> None:
    name, address = network.own_addresses()[0]
    said = reach(agent, RunDir(tmp_path), port=port_of(listening), iface=name)
    assert (said.interface, said.address) == (name, address)


# Goes wrong -----------------------------------------------------------------------------------------------------------


def test_what_goes_wrong_in_an_order_is_told_and_does_not_end_the_agent(agent: Started, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    agent.send(start_in(tmp_path / "file" / "attempt-000"))
    broken = agent.receive()
    assert isinstance(broken, Broken)
    assert "Not a directory" in broken.why
    agent.send(Beat(1.0))
    assert isinstance(agent.receive(), Heartbeat)


def start_in(folder: Path) -> Start:
    """The start of an attempt without ranks, on a node that makes the attempt's folder itself."""
    return Start(
        attempt=0,
        node=0,
        attempt_dir=str(folder),
        apart=True,
        workdir="/",
        setup=(),
        store=False,
        master_port=0,
        warm={"preload": "", "env": {}, "python": ()},
        console=(),
        ranks=(),
    )


# Where the store listens ----------------------------------------------------------------------------------------------


def bound(started: Started, prepare: Prepare) -> tuple[str, str]:
    """Return where a node says that the store listens, and where the kernel says so."""
    started.send(prepare)
    prepared = started.receive()
    assert isinstance(prepared, Prepared)
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    (local,) = (row[1] for row in rows if row[3] == "0A" and int(row[1].partition(":")[2], 16) == prepared.port)
    return prepared.bound, socket.inet_ntoa(bytes.fromhex(local.partition(":")[0])[::-1])


def test_the_store_listens_at_the_address_of_node_0_alone(agent: Started) -> None:
    _, address = network.own_addresses()[0]
    assert bound(agent, Prepare(0, address)) == (address, address)


def test_the_store_listens_on_the_network_that_the_user_has_chosen(agent: Started) -> None:
    name, address = network.own_addresses()[0]
    assert bound(agent, Prepare(0, LOOPBACK, name)) == (address, address)


def test_where_node_0_does_not_have_its_address_the_store_listens_everywhere_and_it_says_so(agent: Started) -> None:
    """As behind a translated address; 203.0.113.1 is nobody's (RFC 5737)."""
    assert bound(agent, Prepare(0, "203.0.113.1")) == ("", "0.0.0.0")
