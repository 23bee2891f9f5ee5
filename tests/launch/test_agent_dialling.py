"""The agent that dials its supervisor: tokens, several addresses, patience and its end."""

import socket
from pathlib import Path

import pytest

from launch import agent
from support.agents import DEADLINE_S, LOOPBACK, closed_port, port_of

# Dialling -------------------------------------------------------------------------------------------------------------


def test_it_dials_and_shows_the_token_that_only_its_environment_holds(start_agent, listening) -> None:
    started = start_agent("--node", "1", "--connect", f"{LOOPBACK}:{port_of(listening)}", MUSTER_TOKEN="secret")
    assert started.accept(listening) == {"token": "secret"}
    hello = started.receive()
    assert (hello["node"], hello["address"]) == (1, LOOPBACK)
    assert b"secret" not in Path(f"/proc/{started.process.pid}/cmdline").read_bytes()


def test_the_token_may_stand_in_a_file(start_agent, listening, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("from-a-file\n")
    connect = ("--connect", f"{LOOPBACK}:{port_of(listening)}", "--token-file", str(tmp_path / "token"))
    assert start_agent("--node", "0", *connect).accept(listening) == {"token": "from-a-file"}


def test_a_token_file_that_this_node_cannot_see_is_said_with_what_to_do(start_agent, listening, tmp_path: Path) -> None:
    missing = tmp_path / "elsewhere" / "token"
    connect = f"{LOOPBACK}:{port_of(listening)}"
    code, said = start_agent("--node", "0", "--connect", connect, "--token-file", str(missing)).end()
    assert code == 78
    assert said == (
        f"muster agent on {socket.gethostname()}: cannot read {missing}: No such file or directory; over this "
        "transport the run folder must be on storage that every node sees: choose one with --runs DIR, or use "
        "--on ssh\n"
    )


def test_of_several_addresses_it_takes_the_one_that_answers(start_agent, listening) -> None:
    connect = f"{LOOPBACK}:{closed_port()},{LOOPBACK}:{port_of(listening)}"
    assert start_agent("--node", "0", "--connect", connect).accept(listening) == {"token": ""}


def test_it_goes_on_dialling_until_somebody_listens(start_agent) -> None:
    port = closed_port()
    started = start_agent("--node", "0", "--connect", f"{LOOPBACK}:{port}", "--dial-timeout-s", "50")
    started.process.poll()
    with socket.create_server((LOOPBACK, port)) as listening:
        assert started.accept(listening) == {"token": ""}


def test_a_refused_dial_is_followed_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    port = closed_port()
    servers: list[socket.socket] = []
    monkeypatch.setattr("time.sleep", lambda _: servers.append(socket.create_server((LOOPBACK, port))))
    with agent.dial([f"{LOOPBACK}:{port}"], DEADLINE_S) as connection, servers[0]:
        assert len(servers) == 1
        assert connection.getpeername() == (LOOPBACK, port)


def test_a_connection_to_itself_is_no_answer(monkeypatch: pytest.MonkeyPatch, listening) -> None:
    """Of a port in the ephemeral range a dialler may get the very number that it dials: TCP's simultaneous open."""
    itself = socket.socket()
    itself.bind((LOOPBACK, 0))
    itself.connect(itself.getsockname())
    real = socket.create_connection
    answers = iter([lambda *_, **__: itself, real])
    monkeypatch.setattr("socket.create_connection", lambda *args, **keys: next(answers)(*args, **keys))
    with agent.dial([f"{LOOPBACK}:{port_of(listening)}"], DEADLINE_S) as connection:
        assert connection is not itself
        assert connection.getpeername() == listening.getsockname()
    itself.close()


def test_it_gives_up_at_its_deadline_and_says_whom_it_called(start_agent) -> None:
    first, second = closed_port(), closed_port()
    connect = f"{LOOPBACK}:{first},{LOOPBACK}:{second}"
    code, said = start_agent("--node", "0", "--connect", connect, "--dial-timeout-s", "0.3").end()
    assert code == 69
    assert said == (
        f"muster agent on {socket.gethostname()}: no supervisor at {LOOPBACK}:{first} or {LOOPBACK}:{second} within "
        "0.3 s: Connection refused\n"
    )


def test_one_that_nobody_listens_to_any_more_stops_dialling(start_agent) -> None:
    """Its pdsh was ended by Ctrl-C, and with it the ssh that held its standard error."""
    started = start_agent("--node", "0", "--connect", f"{LOOPBACK}:{closed_port()}", "--dial-timeout-s", "1000")
    started.process.stderr.close()
    assert started.process.wait(DEADLINE_S) == 69
