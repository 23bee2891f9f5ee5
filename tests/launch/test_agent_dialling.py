"""The agent that dials its supervisor: its key, several addresses, patience and its end."""

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from muster.jobs.basics.handshake import node_key
from muster.launch import agent
from support.agents import DEADLINE_S, LOOPBACK, RUN_SECRET, closed_port, port_of, prove_supervisor

pytestmark = pytest.mark.command

KEY = node_key(RUN_SECRET, 0)
NO_VARIABLE = {agent.SECRET: ""}


@contextmanager
def answered(*servers: socket.socket) -> Iterator[None]:
    """Let one connection prove itself at each of these ports, while this thread dials them."""

    def answer(server: socket.socket) -> None:
        server.settimeout(DEADLINE_S)
        connection, _ = server.accept()
        with connection, connection.makefile("rwb", buffering=0) as stream:
            prove_supervisor(stream, RUN_SECRET)

    threads = [threading.Thread(target=answer, args=(server,)) for server in servers]
    for thread in threads:
        thread.start()
    yield
    for thread in threads:
        thread.join()


# Dialling -------------------------------------------------------------------------------------------------------------


def test_it_dials_and_proves_the_secret_that_only_its_environment_holds(start_agent, listening) -> None:
    connect = f"{LOOPBACK}:{port_of(listening)}"
    started = start_agent("--node", "1", "--connect", connect, MUSTER_SECRET="hidden")
    assert started.accept(listening, "hidden") == 1
    assert started.greeted().address == LOOPBACK
    assert b"hidden" not in Path(f"/proc/{started.process.pid}/cmdline").read_bytes()


def test_the_key_of_its_node_is_enough(start_agent, listening) -> None:
    keys = {agent.SECRET: "", agent.KEY: node_key("of the run", 3)}
    started = start_agent("--node", "3", "--connect", f"{LOOPBACK}:{port_of(listening)}", **keys)
    assert started.accept(listening, "of the run") == 3


def test_the_secret_may_stand_in_a_file(start_agent, listening, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("from-a-file\n")
    connect = ("--connect", f"{LOOPBACK}:{port_of(listening)}", "--secret-file", str(tmp_path / "token"))
    assert start_agent("--node", "0", *connect, **NO_VARIABLE).accept(listening, "from-a-file") == 0


def planted(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file to another user")
    path.write_text("planted\n")
    os.chown(path, 65_534, 65_534)


UNUSABLE: dict[str, tuple[Callable[[Path], object] | None, str]] = {
    "none is named": (None, "has neither MUSTER_KEY nor MUSTER_SECRET; paste the whole line"),
    "missing": (
        lambda path: None,
        "cannot read {path}: No such file or directory; with this transport the run folder must be on storage that "
        "every node sees: choose one with --runs DIR, or use --on ssh",
    ),
    "another user's": (planted, "{path} belongs to user 65534, expected you; it was not used"),
    "link": (lambda path: path.symlink_to("/etc/hostname"), ""),
    "pipe": (os.mkfifo, ""),
}


@pytest.mark.parametrize("kind", UNUSABLE)
def test_a_secret_that_cannot_be_had_is_said_before_anybody_is_dialled(start_agent, tmp_path: Path, kind: str) -> None:
    make, wanted = UNUSABLE[kind]
    path = tmp_path / "token"
    if make is not None:
        make(path)
    file = ("--secret-file", str(path)) if make is not None else ()
    code, said = start_agent("--node", "0", "--connect", f"{LOOPBACK}:{closed_port()}", *file, **NO_VARIABLE).end()
    start = f"muster agent on {socket.gethostname()}: "
    assert (code, said.count("\n"), said.startswith(start)) == (78, 1, True)
    assert said == f"{start}{wanted.format(path=path)}\n" if wanted else str(path) in said


def test_of_several_addresses_it_takes_the_one_that_answers(start_agent, listening) -> None:
    connect = f"{LOOPBACK}:{closed_port()},{LOOPBACK}:{port_of(listening)}"
    assert start_agent("--node", "2", "--connect", connect).accept(listening) == 2


def test_it_goes_on_dialling_until_somebody_listens(start_agent) -> None:
    port = closed_port()
    started = start_agent("--node", "0", "--connect", f"{LOOPBACK}:{port}", "--dial-timeout-s", "50")
    started.process.poll()
    with socket.create_server((LOOPBACK, port)) as listening:
        assert started.accept(listening) == 0


def test_a_refused_dial_is_followed_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    port = closed_port()
    servers: list[socket.socket] = []
    answering = []

    def serve(_: float) -> None:
        servers.append(socket.create_server((LOOPBACK, port)))
        answering.append(answered(servers[0]))
        answering[0].__enter__()

    monkeypatch.setattr("muster.launch.agent.time.sleep", serve)
    with agent.dial([f"{LOOPBACK}:{port}"], 0, KEY, DEADLINE_S) as connection, servers[0]:
        assert len(servers) == 1
        assert connection.getpeername() == (LOOPBACK, port)
        answering[0].__exit__(None, None, None)


def test_a_connection_to_itself_is_no_answer(monkeypatch: pytest.MonkeyPatch, listening) -> None:
    """Of a port in the ephemeral range a dialler may get the very number that it dials: TCP's simultaneous open."""
    itself = socket.socket()
    itself.bind((LOOPBACK, 0))
    itself.connect(itself.getsockname())
    real = socket.create_connection
    answers = iter([lambda *_, **__: itself, real])
    monkeypatch.setattr("socket.create_connection", lambda *args, **keys: next(answers)(*args, **keys))
    with answered(listening), agent.dial([f"{LOOPBACK}:{port_of(listening)}"], 0, KEY, DEADLINE_S) as connection:
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
