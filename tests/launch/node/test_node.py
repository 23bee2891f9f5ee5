"""The agent before the start of ranks: beats, the store's port, the way to the master, the run folder."""

import socket
import time
from pathlib import Path
from typing import Any

from jobs import network
from jobs.files import write_text
from jobs.rundir import RunDir
from launch.fingerprint import fingerprint
from support.agents import DEADLINE_S, LOOPBACK, Started, closed_port, port_of

# Before the start -----------------------------------------------------------------------------------------------------


def test_a_beat_is_answered_with_both_times_of_this_clock(start_agent) -> None:
    started = start_agent("--node", "0")
    started.receive()
    began = time.time()
    started.send(do="beat", sent=7.25)
    answer = started.receive()
    assert (answer["did"], answer["sent"]) == ("heartbeat", 7.25)
    assert began <= answer["heard"] <= answer["time"] <= time.time()


def test_the_port_that_it_prepares_is_bound_before_it_is_told(start_agent) -> None:
    started = start_agent("--node", "0")
    started.receive()
    started.send(do="prepare", bind=LOOPBACK)
    prepared = started.receive()
    with socket.create_connection((LOOPBACK, prepared["port"]), timeout=DEADLINE_S):
        pass  # it waits in the backlog
    assert prepared == {
        "did": "prepared",
        "attempt": 0,
        "port": prepared["port"],
        "addresses": [list(route) for route in network.own_addresses()],
    }


def reach(started: Started, run: RunDir, *, port: int, iface: str | None = None) -> dict[str, Any]:
    started.receive()
    started.send(do="reach", address=LOOPBACK, port=port, iface=iface, run=str(run.path), nonce="the nonce")
    return started.receive()


def test_it_tries_the_way_to_the_master_and_the_run_folder(start_agent, listening, tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    write_text(run.nonce("supervisor"), "the nonce")
    assert reach(start_agent("--node", "0"), run, port=port_of(listening)) == {
        "did": "reached",
        "attempt": 0,
        "interface": "lo",
        "address": LOOPBACK,
        "why": "",
        "code": fingerprint(),
        "storage": "shared",
        "run": str(tmp_path),
        "storage_why": "",
    }


def test_a_master_that_cannot_be_reached_is_said_with_the_kernels_reason(start_agent, tmp_path: Path) -> None:
    said = reach(start_agent("--node", "0"), RunDir(tmp_path), port=closed_port())
    assert (said["why"], said["storage"]) == ("Connection refused", "apart")


def test_a_network_of_the_users_choice_comes_before_the_route(start_agent, listening, tmp_path: Path) -> None:
    name, address = network.own_addresses()[0]
    said = reach(start_agent("--node", "0"), RunDir(tmp_path), port=port_of(listening), iface=name)
    assert (said["interface"], said["address"]) == (name, address)


# Goes wrong -----------------------------------------------------------------------------------------------------------


def test_what_goes_wrong_in_an_order_is_told_and_does_not_end_the_agent(start_agent, tmp_path: Path) -> None:
    started = start_agent("--node", "0")
    started.receive()
    started.send(do="prepare", bind="203.0.113.1")  # an address of nobody (RFC 5737)
    broken = started.receive()
    assert broken["did"] == "broken"
    assert "Cannot assign requested address" in broken["broken"]
    started.send(do="beat", sent=1.0)
    assert started.receive()["did"] == "heartbeat"
