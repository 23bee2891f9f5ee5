"""Agent and supervisor prove to each other that they hold a node's key; nobody else gets anything or is obeyed."""

import os
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.jobs.basics import handshake
from muster.jobs.basics.handshake import (
    LONGEST,
    AgentSide,
    HandshakeError,
    SupervisorSide,
    new_secret,
    node_key,
    read_greeting,
)
from muster.launch.wire.codec import encode
from muster.launch.wire.keys import KEY, SECRET
from muster.launch.wire.messages import Beat, Start
from support.agents import DEADLINE_S, LOOPBACK, RUN_SECRET, Started, port_of

pytestmark = pytest.mark.command

DIALLED = "10.10.1.1:61000"
SECRET_OF_RUN = new_secret()


def agent(node: int = 3, *, secret: str = SECRET_OF_RUN, dialled: str = DIALLED) -> AgentSide:
    return AgentSide(node_key(secret, node), node, dialled)


def supervisor(
    greeting: bytes, *, secret: str = SECRET_OF_RUN, run: str = "run-1", attempt: int = 0, node: int | None = None
) -> SupervisorSide:
    """The supervisor's end, as the listener makes it of an agent's first line; it takes the agent for `node`."""
    said = read_greeting(greeting)
    return SupervisorSide(node_key(secret, said[0] if node is None else node), said, run, attempt)


# Both ends ------------------------------------------------------------------------------------------------------------


@given(node=st.integers(0, 10**6), attempt=st.integers(0, 10**6))
def test_two_ends_of_one_run_agree(node: int, attempt: int) -> None:
    ours = agent(node)
    theirs = supervisor(ours.greeting(), attempt=attempt)
    assert theirs.is_proved(ours.answer(theirs.challenge()))


def test_every_line_is_short_ascii_and_holds_neither_key_nor_secret() -> None:
    ours = agent()
    theirs = supervisor(ours.greeting())
    challenge = theirs.challenge()
    for line in (ours.greeting(), challenge, ours.answer(challenge)):
        assert line.isascii()
        assert (line.count(b"\n"), line[-1:]) == (1, b"\n")
        assert len(line) < LONGEST
        assert SECRET_OF_RUN.encode() not in line
        assert node_key(SECRET_OF_RUN, 3).encode() not in line


def test_secrets_nonces_and_keys_are_long_and_never_the_same() -> None:
    assert len({new_secret() for _ in range(20)}) == 20
    assert len({agent().nonce for _ in range(20)}) == 20
    assert len({node_key(SECRET_OF_RUN, node) for node in range(20)}) == 20
    assert (len(SECRET_OF_RUN), len(agent().nonce), len(node_key("s", 0))) == (64, 32, 64)


# Who is not believed --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "other",
    [
        {"secret": new_secret()},  # of another run
        {"node": 2},  # who holds the key of another node poses as the supervisor
    ],
)
def test_an_agent_does_not_believe_a_supervisor_without_its_key(other: dict) -> None:
    ours = agent()
    with pytest.raises(HandshakeError, match="does not hold this agent's key"):
        ours.answer(supervisor(ours.greeting(), **other).challenge())


@pytest.mark.parametrize("part", range(2, 6))  # run, attempt, nonce, proof
def test_an_agent_does_not_believe_a_line_that_was_changed_on_its_way(part: int) -> None:
    ours = agent()
    words = supervisor(ours.greeting()).challenge().split()
    words[part] = words[part][:-1] + (b"0" if words[part][-1:] != b"0" else b"1")
    with pytest.raises(HandshakeError, match="does not hold this agent's key"):
        ours.answer(b" ".join(words) + b"\n")


@pytest.mark.parametrize("given_key", [node_key(new_secret(), 3), node_key(SECRET_OF_RUN, 2), ""])
def test_a_supervisor_does_not_believe_an_agent_without_the_key(given_key: str) -> None:
    posing = AgentSide(given_key, 3, DIALLED)
    theirs = supervisor(posing.greeting())
    run, attempt, nonce = theirs.challenge().decode().split()[2:5]
    about = (run, attempt, "3", posing.nonce, nonce, DIALLED)
    assert not theirs.is_proved(handshake.proof(given_key, handshake.AGENT, about).encode() + b"\n")


def test_a_proof_that_is_sent_back_is_no_proof() -> None:
    ours = agent()
    theirs = supervisor(ours.greeting())
    assert not theirs.is_proved(theirs.challenge().split()[-1] + b"\n")


def test_a_supervisors_line_of_an_earlier_connection_is_no_proof() -> None:
    first, second = agent(), agent()
    heard = supervisor(first.greeting()).challenge()
    with pytest.raises(HandshakeError, match="does not hold this agent's key"):
        second.answer(heard)


def test_an_agents_proof_of_an_earlier_connection_is_no_proof() -> None:
    ours = agent()
    greeting = ours.greeting()
    first = supervisor(greeting)
    heard = ours.answer(first.challenge())
    assert first.is_proved(heard)
    assert not supervisor(greeting).is_proved(heard), "the same greeting, and another nonce of the supervisor's"


@pytest.mark.parametrize("about", [{"run": "run-2"}, {"attempt": 1}])
def test_a_proof_is_for_one_run_and_attempt(about: dict) -> None:
    ours = agent()
    greeting = ours.greeting()
    theirs = supervisor(greeting, **about)
    heard = ours.answer(theirs.challenge())
    assert theirs.is_proved(heard)
    assert not supervisor(greeting).is_proved(heard)


def test_whoever_passes_on_what_both_ends_say_from_another_address_is_found_out() -> None:
    """The agent dialled a relay, which tells the supervisor that the agent dialled the supervisor itself."""
    relay = "10.10.1.66:61000"
    ours = agent(dialled=relay)
    words = ours.greeting().decode().split()
    theirs = supervisor((" ".join([*words[:-1], DIALLED]) + "\n").encode())
    with pytest.raises(HandshakeError, match="does not hold this agent's key"):
        ours.answer(theirs.challenge())


# Other protocols ------------------------------------------------------------------------------------------------------

OTHER = [
    b"",
    b"\n",
    b"muster/1 agent 3 aa bb",  # no end
    b"muster/1 agent 3 aa\n",
    b"muster/1 agent 3 aa bb cc\n",
    b"muster/2 agent 3 aa bb\n",
    b"muster/1 supervisor 3 aa bb\n",
    b"muster/1 agent -1 aa bb\n",
    b"muster/1 agent 3.0 aa bb\n",
    b"muster/1 agent 12345678 aa bb\n",
    "muster/1 agent \N{FULLWIDTH DIGIT THREE} aa bb\n".encode(),
    b"muster/1 agent \xb2 aa bb\n",
    b"muster/1 agent 3 a\x1ba bb\n",
    b"muster/1 agent 3 a\0a bb\n",
    b"GET / HTTP/1.1\r\n",
    b'{"token": "\\ud800"}\n',
    b"\xff\xfe\n",
]


@pytest.mark.parametrize("read", [read_greeting, agent().answer])
@pytest.mark.parametrize("line", OTHER)
def test_a_line_of_another_protocol_is_no_greeting_and_no_answer(read: Callable[[bytes], object], line: bytes) -> None:
    with pytest.raises(HandshakeError, match="speaks another protocol"):
        read(line)


@given(line=st.binary(max_size=200))
def test_no_bytes_do_anything_but_fail(line: bytes) -> None:
    for read in (read_greeting, agent().answer):
        with pytest.raises(HandshakeError):
            read(line + b"\n")  # type: ignore[operator]
    ours = agent()
    assert not supervisor(ours.greeting()).is_proved(line)


# A real agent, and whoever answers ------------------------------------------------------------------------------------


def start_that_leaves(mark: Path) -> bytes:
    """The message by which a supervisor has a node run something."""
    start = Start(
        attempt=0,
        node=0,
        attempt_dir=str(mark.parent),
        apart=True,
        workdir=str(mark.parent),
        setup=(f"touch {mark}",),
        store=False,
        master_port=0,
        warm={"preload": "", "env": {}, "python": ()},
        console=(),
        ranks=({"rank": 0, "argv": ["touch", str(mark)], "env": {}, "workdir": "/", "out": "/dev/null"},),
    )
    return encode(Beat(1.0)) + encode(start)


@contextmanager
def answering(server: socket.socket) -> Iterator[tuple[socket.socket, BinaryIO]]:
    """Take the connection of an agent; closed at the end."""
    server.settimeout(DEADLINE_S)
    connection, _ = server.accept()
    connection.settimeout(DEADLINE_S)
    with connection, connection.makefile("rb") as stream:
        yield connection, stream


def received_by_an_impostor(started: Started, server: socket.socket, *sent: bytes) -> bytes:
    """Answer an agent with these lines, the last after its second; return all that it has sent."""
    with answering(server) as (connection, stream):
        heard = stream.readline()
        for line in sent:
            connection.sendall(line)
        connection.shutdown(socket.SHUT_WR)
        try:
            return heard + stream.read()
        except ConnectionResetError:  # it hung up while we still had something to say
            return heard


@pytest.fixture
def dialling(start_agent, listening) -> Started:
    return start_agent("--node", "0", "--connect", f"{LOOPBACK}:{port_of(listening)}")


def said_of(port: int, what: str) -> str:
    return (
        f"muster agent on {socket.gethostname()}: the program that answers at {LOOPBACK}:{port} {what}, so this "
        "agent ends; paste the lines of one muster cmd, and let no other program use that port\n"
    )


GREETING = re.compile(rb"muster/1 agent 0 [0-9a-f]{32} 127\.0\.0\.1:\d+\n")


IMPOSTORS = {
    "the supervisor of another run": node_key("another", 0),
    "another node": node_key(RUN_SECRET, 1),
    "somebody without a key": "",
}


@pytest.mark.parametrize("who", IMPOSTORS)
@pytest.mark.parametrize("hasty", [False, True])
def test_an_impostor_gets_nothing_but_the_greeting_and_nothing_of_it_is_run(
    dialling: Started, listening: socket.socket, tmp_path: Path, who: str, hasty: bool
) -> None:
    """The first finding: another user binds the port that stands in `ps`, and sends setup lines."""
    orders = start_that_leaves(tmp_path / "mark")
    with answering(listening) as (connection, stream):
        greeting = stream.readline()
        end = SupervisorSide(IMPOSTORS[who], read_greeting(greeting), "run-1", 0)
        connection.sendall(end.challenge() + (orders if hasty else b""))
        code, said = dialling.end()
        rest = b""
        with suppress(ConnectionError):  # it hung up, perhaps with our words unread
            connection.sendall(orders)
            rest = stream.read()
    assert GREETING.fullmatch(greeting)
    assert rest == b""
    why = "speaks another protocol" if hasty else "does not hold this agent's key"
    assert (code, said) == (78, said_of(port_of(listening), why))
    assert list(tmp_path.iterdir()) == []


def test_one_that_speaks_the_protocol_without_a_handshake_is_not_obeyed(
    dialling: Started, listening: socket.socket, tmp_path: Path
) -> None:
    """As agents of earlier versions would have: the token was sent, and whoever took it was the supervisor."""
    heard = received_by_an_impostor(dialling, listening, start_that_leaves(tmp_path / "mark"))
    code, said = dialling.end()
    assert GREETING.fullmatch(heard)
    assert (code, said) == (78, said_of(port_of(listening), "speaks another protocol"))
    assert list(tmp_path.iterdir()) == []


def test_one_that_answers_without_end_is_left(dialling: Started, listening: socket.socket) -> None:
    with answering(listening) as (connection, _):
        connection.sendall(b"x" * LONGEST)
        code, said = dialling.end()
    assert (code, said) == (78, said_of(port_of(listening), "speaks another protocol"))


def test_messages_before_the_proof_are_not_read_as_messages(
    dialling: Started, listening: socket.socket, tmp_path: Path
) -> None:
    """What comes in one packet with a true proof is of the supervisor: it is read after the proof was checked."""
    with answering(listening) as (connection, stream):
        end = SupervisorSide(node_key(RUN_SECRET, 0), read_greeting(stream.readline()), "run-1", 0)
        connection.sendall(start_that_leaves(tmp_path / "mark") + end.challenge())
        code, _ = dialling.end()
    assert code == 78
    assert list(tmp_path.iterdir()) == []


def test_of_several_addresses_a_strangers_is_passed_over(start_agent, listening: socket.socket) -> None:
    """Under srun an agent may try every address that the supervisor listed."""
    with socket.create_server((LOOPBACK, 0)) as stranger:
        connect = f"{LOOPBACK}:{port_of(stranger)},{LOOPBACK}:{port_of(listening)}"
        started = start_agent("--node", "0", "--connect", connect)
        assert GREETING.fullmatch(received_by_an_impostor(started, stranger, b"HTTP/1.1 400 Bad Request\r\n"))
        assert started.accept(listening) == 0
        assert started.greeted().address == LOOPBACK


def test_keys_stand_where_other_users_cannot_read_them(start_agent, listening) -> None:
    started = start_agent("--node", "0", "--connect", f"{LOOPBACK}:{port_of(listening)}")
    started.accept(listening)
    started.greeted()
    assert {SECRET, KEY} == {"MUSTER_SECRET", "MUSTER_KEY"}
    environment = Path(f"/proc/{started.process.pid}/environ")
    assert (environment.stat().st_mode & 0o077, environment.stat().st_uid) == (0, os.geteuid())
