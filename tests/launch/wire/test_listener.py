"""The supervisor's port under attack: whoever reaches it may connect, and that must not hurt the run."""

import asyncio
import os
import resource
import socket
import sys
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, contextmanager, suppress

import pytest

from muster.jobs.basics.errors import RefusedError
from muster.jobs.basics.handshake import LONGEST, AgentSide, node_key
from muster.launch.agent import dial, hello, line
from muster.launch.wire import door as module
from muster.launch.wire.channel import Channel, over_socket
from muster.launch.wire.codec import encode
from muster.launch.wire.door import Door
from muster.launch.wire.listener import Listener
from muster.launch.wire.messages import Held
from support.agents import DEADLINE_S, LOOPBACK

pytestmark = pytest.mark.slow

MIB = 1 << 20


class Watched:
    """A listener, and what it has reported."""

    def __init__(self, nodes: int, **fields: object) -> None:
        self.said: list[str] = []
        self.listener = Listener(nodes, run="run-1", report=self.said.append, **fields)  # type: ignore[arg-type]

    @property
    def refused(self) -> int:
        """How many connections it says that it refused."""
        return sum(int(text.split()[1]) for text in self.said)

    async def until(self, word: str) -> str:
        """Wait for a report with a word in it, and return it."""
        while not (found := [text for text in self.said if word in text]):
            await asyncio.sleep(0.01)
        return found[0]

    async def until_refused(self, count: int) -> None:
        """Wait until so many refusals were reported."""
        while self.refused < count:
            await asyncio.sleep(0.01)

    async def agent(self, node: int = 0) -> Channel:
        """Dial as an agent does, greet, and return its end."""
        key = node_key(self.listener.secret, node)
        connection = await asyncio.to_thread(dial, self.listener.addresses, node, key, DEADLINE_S)
        connection.sendall(line(hello(LOOPBACK)))
        return await over_socket(connection)

    async def meets(self, node: int = 0) -> None:
        """Let a node's agent in."""
        agent = await self.agent(node)
        channel = await self.listener.accept()
        assert channel.node == node
        assert (await channel.receive_hello()).address == LOOPBACK
        channel.close()
        agent.close()


@asynccontextmanager
async def opened(nodes: int = 1, **fields: object) -> AsyncIterator[Watched]:
    made = Watched(nodes, **fields)
    await made.listener.open(LOOPBACK)
    try:
        yield made
    finally:
        made.listener.close()
        await asyncio.sleep(0)  # its tasks end


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REPORT_S", 0.05)


ATTACK = """
import socket, sys, time
address, count, kind = ("127.0.0.1", int(sys.argv[1])), int(sys.argv[2]), sys.argv[3]
first = {"held": b"", "slow": b"muster/1 age", "huge": b"x" * (15 << 20), "json": b'{"token": "\\\\ud800"}\\n'}[kind]
held = []
for number in range(count):
    one = socket.create_connection(address, timeout=10.0)
    held.append(one)
    try:
        one.sendall(first)
    except OSError:
        pass
print("ready", flush=True)
sys.stdin.read()
"""


@asynccontextmanager
async def attacked(port: int, count: int, kind: str) -> AsyncIterator[None]:
    """Another process holds connections; when it has them all, go on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = 4096 if hard == resource.RLIM_INFINITY else min(hard, 4096)
    attacker = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", ATTACK, str(port), str(count), kind),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, enough), hard)),
    )
    assert await attacker.stdout.readline() == b"ready\n"
    try:
        yield
    finally:
        await attacker.communicate(b"")


# What strangers send --------------------------------------------------------------------------------------------------

GARBAGE = {
    "another protocol": (b"GET / HTTP/1.1\r\n\r\n", "speaks another protocol"),
    "JSON": (b'{"token": "guess"}\n', "speaks another protocol"),
    "a message": (encode(Held(0, 3)), "speaks another protocol"),
    "no end of a line": (b"x" * (2 * LONGEST), "speaks another protocol"),
    "nothing": (b"", "hung up"),
    "half a line": (b"muster/1 agent 0 aa", "hung up"),
    "another address": (b"muster/1 agent 0 aa 10.0.0.1:61000\n", "dialled another address"),
}


@pytest.mark.parametrize("kind", GARBAGE)
async def test_a_stranger_is_hung_up_on_and_said_and_an_agent_gets_in(kind: str) -> None:
    sent, why = GARBAGE[kind]
    async with opened() as watched:
        reader, writer = await asyncio.open_connection(LOOPBACK, watched.listener.port)
        writer.write(sent)
        writer.write_eof()
        with suppress(ConnectionResetError):  # it hung up with something unread
            assert await reader.read() == b""
        writer.close()
        port = watched.listener.port
        assert await watched.until("refused") == (
            f"refused 1 connection to port {port}: 1 x {why}; last from 127.0.0.1"
        )
        await watched.meets()


@pytest.mark.parametrize("node", [0, 1, 9_999_999])
async def test_a_stranger_who_greets_as_a_node_gets_a_challenge_and_nothing_for_a_wrong_proof(node: int) -> None:
    async with opened() as watched:
        reader, writer = await asyncio.open_connection(LOOPBACK, watched.listener.port)
        end = AgentSide("guessed", node, watched.listener.addresses[0])
        writer.write(end.greeting())
        assert (await reader.readline()).startswith(b"muster/1 supervisor run-1 0 ")
        writer.write(b"0" * 64 + b"\n" + line(hello(LOOPBACK)))
        with suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()
        assert "1 x wrong key" in await watched.until("refused")
        await watched.meets()


async def test_whoever_is_slow_is_hung_up_on_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HANDSHAKE_S", 0.2)
    async with opened() as watched:
        reader, writer = await asyncio.open_connection(LOOPBACK, watched.listener.port)

        async def drip() -> None:
            with suppress(ConnectionError):
                while True:
                    writer.write(b"m")
                    await writer.drain()
                    await asyncio.sleep(0.02)

        dripping = asyncio.create_task(drip())
        assert "1 x silent" in await watched.until("refused")
        with suppress(ConnectionError):
            assert await reader.read() == b""
        await dripping
        writer.close()
        await watched.meets()


# How many strangers there are -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["held", "slow"])
async def test_more_connections_than_have_room_do_not_keep_an_agent_out(kind: str) -> None:
    """The oldest of them go; of each one only the handshake's task is kept."""
    async with opened(2) as watched:
        async with attacked(watched.listener.port, 600, kind):
            await watched.meets(1)
            assert len(watched.listener._door._handshakes) <= module.UNPROVED + 2
            await watched.meets(0)
        await watched.until_refused(600 - module.UNPROVED - 2)
        assert any("too many connections" in text for text in watched.said)


async def test_the_room_for_handshakes_is_enough_for_all_agents_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """They all dial at once: none may be hung up on for another."""
    monkeypatch.setattr(module, "UNPROVED", 1)
    nodes = 40
    async with opened(nodes) as watched:
        ends = []
        for node in range(nodes):  # each is in the middle of its handshake
            reader, writer = await asyncio.open_connection(LOOPBACK, watched.listener.port)
            end = AgentSide(node_key(watched.listener.secret, node), node, watched.listener.addresses[0])
            writer.write(end.greeting())
            ends.append((reader, writer, end))
        for reader, writer, end in ends:
            writer.write(end.answer(await reader.readline()))
        met = [await watched.listener.accept() for _ in ends]
        assert {channel.node for channel in met} == set(range(nodes))
        assert watched.said == []
        for channel in met:
            channel.close()
        for _, writer, _ in ends:
            writer.close()


async def test_megabytes_without_a_newline_cost_no_memory() -> None:
    """The fourth finding: 24 huge lines were 370 MB."""
    async with opened() as watched:
        tracemalloc.start()
        try:
            async with attacked(watched.listener.port, 24, "huge"):
                await watched.meets()
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < 4 * MIB


async def test_however_many_are_refused_there_is_one_line_for_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REPORT_S", 0.5)
    loop = asyncio.get_running_loop()
    async with opened() as watched:
        began = loop.time()
        async with attacked(watched.listener.port, 300, "json"):
            await watched.until_refused(300)
        assert len(watched.said) <= (loop.time() - began) / 0.5
        assert watched.refused == 300
        assert all(len(text) < 300 for text in watched.said)


@contextmanager
def most_files(most: int):
    """Let this process open no more than so many files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_process_without_a_free_descriptor_goes_on_listening() -> None:
    async with opened() as watched:
        highest = max(int(name) for name in os.listdir("/proc/self/fd"))  # noqa: PTH208
        stranger = socket.socket()
        stranger.setblocking(False)
        held = [os.dup(0) for _ in range(highest)]
        with most_files(max(held) + 1):
            with suppress(BlockingIOError):
                stranger.connect((LOOPBACK, watched.listener.port))
            assert "Too many open files" in await watched.until("refused")
        for each in held:
            os.close(each)
        stranger.close()
        await watched.meets()
        # a second of pauses, not a line for each try: 160,589 lines were written once
        assert watched.refused < 200


@pytest.mark.parametrize("expected", [False, True])
async def test_other_tasks_run_between_the_connections_of_a_flood(expected: bool) -> None:
    """All connections wait in the backlog: they were accepted in one turn of the loop while no node was expected."""
    async with opened() as watched:
        await watched.meets()
        if expected:
            watched.listener.expect(0)
        held = [socket.create_connection((LOOPBACK, watched.listener.port)) for _ in range(400)]
        for turns in range(1, 6):
            await asyncio.sleep(0)
            door = watched.listener._door
            assert door._refused.total() + len(door._handshakes) <= (turns + 1) * module.ACCEPTS
        for each in held:
            each.close()
        await watched.until_refused(400)
        watched.listener.expect(0)
        await watched.meets()


@pytest.mark.parametrize("turns", range(4))
async def test_a_port_that_is_closed_in_a_flood_reports_no_error(turns: int) -> None:
    errors: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, about: errors.append(about))
    async with opened(2) as watched:
        await watched.meets()
        held = [socket.create_connection((LOOPBACK, watched.listener.port)) for _ in range(100)]
        for _ in range(turns):
            await asyncio.sleep(0)
    for _ in range(5):
        await asyncio.sleep(0)
    assert errors == []
    for each in held:
        each.close()


# Who is expected ------------------------------------------------------------------------------------------------------


async def test_while_no_node_is_expected_nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened() as watched:
        await watched.meets()
        with monkeypatch.context() as patch:
            patch.setattr(Door, "_admit", None)
            reader, writer = await asyncio.open_connection(LOOPBACK, watched.listener.port)
            writer.write(b"muster/1 agent 0 aa bb\n")
            with suppress(ConnectionResetError):
                assert await reader.read() == b""
            writer.close()
            assert "1 x no node is expected" in await watched.until("refused")
        watched.listener.expect(0)  # it was lost, and is started again
        await watched.meets()


@pytest.mark.parametrize("option", [None, socket.SO_REUSEADDR, socket.SO_REUSEPORT])
async def test_the_port_stays_ours_when_all_nodes_have_come(option: int | None) -> None:
    """So that nobody else can take it, and wait there for an agent that is started again."""
    async with opened() as watched:
        await watched.meets()
        assert watched.listener.expected == set()
        with socket.socket() as other:
            if option is not None:
                other.setsockopt(socket.SOL_SOCKET, option, 1)
            for address in (LOOPBACK, ""):
                with pytest.raises(OSError, match="Address already in use"):
                    other.bind((address, watched.listener.port))


async def test_a_second_agent_of_a_node_is_refused() -> None:
    async with opened(2) as watched:
        await watched.meets(0)
        with pytest.raises(SystemExit) as ended:
            await watched.agent(0)
        assert ended.value.code == 78
        assert "1 x node 0 is not expected" in await watched.until("refused")
        await watched.meets(1)


async def test_an_agent_that_nobody_has_accepted_is_hung_up_on_at_the_end() -> None:
    async with opened() as watched:
        agent = await watched.agent(0)
        while watched.listener._accepted.empty():
            await asyncio.sleep(0.01)
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await agent.reader.readexactly(1)
    agent.close()


async def test_of_two_agents_of_a_node_that_prove_themselves_at_once_one_is_let_in() -> None:
    async with opened(2) as watched:
        ends = []
        for _ in range(2):
            connection = socket.create_connection((LOOPBACK, watched.listener.port))
            end = AgentSide(node_key(watched.listener.secret, 0), 0, watched.listener.addresses[0])
            connection.sendall(end.greeting())
            connection.setblocking(False)
            answer = await asyncio.get_running_loop().sock_recv(connection, LONGEST)
            ends.append((connection, end.answer(answer)))
        for connection, proof in ends:  # both before the loop looks again
            connection.send(proof)
        channel = await watched.listener.accept()
        assert "1 x node 0 is not expected" in await watched.until("refused")
        assert watched.listener._accepted.empty()
        channel.close()
        for connection, _ in ends:
            connection.close()


# Its own port and secret ----------------------------------------------------------------------------------------------


async def test_a_port_of_the_users_own_that_is_taken_is_refused_with_its_number() -> None:
    async with opened() as first:
        port = first.listener.port
        second = Watched(1).listener
        with pytest.raises(RefusedError, match=rf"port {port}: cannot be bound here: .*; choose another --port"):
            await second.open(LOOPBACK, port)
        second.close()


async def test_a_given_secret_is_the_one_that_is_asked_for() -> None:
    """So that lines can be printed before the supervisor runs."""
    async with opened(2, secret="printed-long-before") as watched:
        assert watched.listener.secret == "printed-long-before"
        await watched.meets(1)


async def test_it_listens_at_the_address_that_it_is_given_alone() -> None:
    async with opened() as watched:
        with socket.socket() as other, pytest.raises(ConnectionRefusedError):
            other.connect(("127.0.0.2", watched.listener.port))
