"""The control channel over its two carriers: what goes in comes out, and every kind of bad end is said."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launch.channel import CHATTER_LINES, Channel, ChannelClosed, Listener, over_pipes, over_socket

from jobs.errors import RefusedError
from launch.agent import dial, line

LOOPBACK = "127.0.0.1"
DEADLINE_S = 20.0

Ends = tuple[Channel, Channel]


async def closed_for_good(*ends: Channel) -> None:
    """Wait until asyncio, in later turns of its loop, has closed the descriptors of pipes."""
    for end in ends:
        for transport in (end.writer.transport, end.source):
            assert transport is not None
            while not transport.get_extra_info("pipe").closed:
                await asyncio.sleep(0)


async def over_descriptors(reading: int, writing: int) -> Channel:
    """Make an end over two descriptors, which it owns from now on."""
    return await over_pipes(os.fdopen(reading, "rb", 0), os.fdopen(writing, "wb", 0))


@asynccontextmanager
async def piped() -> AsyncIterator[Ends]:
    """Two ends over two pipes, as between the supervisor and an agent that it started."""
    down_read, down_write = os.pipe()
    up_read, up_write = os.pipe()
    ends = await over_descriptors(up_read, down_write), await over_descriptors(down_read, up_write)
    try:
        yield ends
    finally:
        for end in ends:
            end.close()
        await closed_for_good(*ends)


async def dialling(listener: Listener, token: str | None = None) -> Channel:
    """Dial as an agent does, show a token, and return the agent's end."""
    connection = await asyncio.to_thread(dial, [f"{LOOPBACK}:{listener.port}"], DEADLINE_S)
    connection.sendall(line({"token": listener.token if token is None else token}))
    return await over_socket(connection)


@asynccontextmanager
async def dialled() -> AsyncIterator[Ends]:
    """Two ends over TCP: the supervisor's listener, and an agent that has dialled it."""
    listener = Listener()
    await listener.open(LOOPBACK)
    agent = await dialling(listener)
    supervisor = await listener.accept()
    try:
        yield supervisor, agent
    finally:
        listener.close()
        for end in (supervisor, agent):
            end.close()
            with suppress(ConnectionError):  # what a test did to it
                await end.writer.wait_closed()


CARRIERS = pytest.mark.parametrize("carrier", [piped, dialled])


def run(test: Callable[[], Awaitable[None]]) -> None:
    """Run a coroutine under a deadline."""

    async def guarded() -> None:
        await asyncio.wait_for(test(), DEADLINE_S)

    asyncio.run(guarded())


async def is_closed(end: Channel) -> str:
    """Return what an end says when its other one is expected to be gone."""
    with pytest.raises(ChannelClosed) as caught:
        await end.receive()
    return str(caught.value)


async def send_for_ever(end: Channel) -> None:
    """Send until it is refused: the kernel takes the first bytes, and says so only after that."""
    while True:
        await end.send({"do": "stop", "padding": "x" * 100_000})


async def receive_for_ever(end: Channel) -> None:
    """Receive until there is nothing more."""
    while True:
        await end.receive()


# What goes in comes out -----------------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@CARRIERS
@settings(max_examples=25, deadline=None)
@given(messages=st.lists(st.dictionaries(st.text(), JSON, max_size=4), min_size=1, max_size=4))
def test_messages_arrive_whole_and_in_order_both_ways(carrier, messages: list[dict[str, Any]]) -> None:
    async def test() -> None:
        async with carrier() as (supervisor, agent):
            for sender, receiver in ((supervisor, agent), (agent, supervisor)):
                for message in messages:
                    await sender.send(message)
                assert [await receiver.receive() for _ in messages] == messages

    run(test)


@CARRIERS
@pytest.mark.parametrize("text", ["line\nline\r\n\x00\x1f", "größe \u2028 🚀", "\ud800 alone", '"}\n{"', ""])
def test_text_of_any_kind_stays_one_message(carrier, text: str) -> None:
    async def test() -> None:
        async with carrier() as (supervisor, agent):
            await supervisor.send({text: [text]})
            assert await agent.receive() == {text: [text]}

    run(test)


@CARRIERS
def test_a_start_message_of_a_large_node_is_no_trouble(carrier) -> None:
    message = {"ranks": [{"rank": rank, "env": {"X": "x" * 10_000}} for rank in range(256)]}

    async def test() -> None:
        async with carrier() as (supervisor, agent):
            _, received = await asyncio.gather(supervisor.send(message), agent.receive())
            assert received == message

    run(test)


# Ends -----------------------------------------------------------------------------------------------------------------


@CARRIERS
def test_what_was_sent_before_the_other_end_went_still_arrives_then_it_is_closed(carrier) -> None:
    async def test() -> None:
        async with carrier() as (supervisor, agent):
            await agent.send({"did": "swept"})
            agent.close()
            assert await supervisor.receive() == {"did": "swept"}
            assert await is_closed(supervisor) == "the connection ended"

    run(test)


@CARRIERS
def test_sending_to_an_end_that_has_gone_is_closed_not_an_error_of_the_system(carrier) -> None:
    async def test() -> None:
        async with carrier() as (supervisor, agent):
            agent.close()
            await is_closed(supervisor)
            with pytest.raises(ChannelClosed):
                await send_for_ever(supervisor)

    run(test)


@CARRIERS
@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"did": "hel', "the connection ended"),  # torn: its sender was killed
        (b"Welcome to n01!\n", "Expecting value: line 1 column 1 (char 0)"),  # a login script that prints
        (b"\xff\xfe\n", None),
        (b"[1, 2]\n", r"not a message: b'[1, 2]\n'"),
        (b"\n", None),
        (b"[" * 100_000 + b"\n", None),  # deeper than Python reads
    ],
)
def test_a_line_that_is_no_message_closes_the_channel(carrier, line: bytes, said: str | None) -> None:
    async def test() -> None:
        async with carrier() as (supervisor, agent):
            agent.writer.write(line)
            if not line.endswith(b"\n"):
                agent.close()
            text = await is_closed(supervisor)
            assert text
            assert said in (None, text)

    run(test)


def test_a_line_beyond_the_limit_closes_the_channel_instead_of_filling_the_memory(monkeypatch) -> None:
    monkeypatch.setattr("launch.channel.LINE_LIMIT", 1 << 10)

    async def test() -> None:
        async with dialled() as (supervisor, agent):
            await agent.send({"padding": "x" * (1 << 12)})
            await is_closed(supervisor)

    run(test)


# The token ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", ["wrong", "", "größe"])
def test_a_wrong_token_is_refused_and_said(token: str, capsys: pytest.CaptureFixture[str]) -> None:
    async def test() -> None:
        listener = Listener()
        await listener.open(LOOPBACK)
        stranger = await dialling(listener, token)
        assert (await stranger.receive())["why"] == "wrong token"
        assert await is_closed(stranger)
        friend = await dialling(listener)
        await friend.send({"did": "hello"})
        accepted = await listener.accept()  # the first that is accepted is the one with the token
        assert await accepted.receive() == {"did": "hello"}
        listener.close()
        for end in (stranger, friend, accepted):
            end.close()

    run(test)
    said = capsys.readouterr().err
    assert said.startswith("muster: refused a connection from ('127.0.0.1', ")
    assert said.endswith("): wrong token\n")
    assert said.count("\n") == 1


@pytest.mark.parametrize("first", [b"GET / HTTP/1.1\r\n", b'["token"]\n', b'{"token": 7}\n', b'{"token": null}\n', b""])
def test_somebody_who_speaks_another_protocol_is_refused(first: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    async def test() -> None:
        listener = Listener()
        await listener.open(LOOPBACK)
        reader, writer = await asyncio.open_connection(LOOPBACK, listener.port)
        writer.write(first)
        writer.write_eof()
        assert await reader.read() == b""
        listener.close()
        writer.close()

    run(test)
    assert "wrong token" in capsys.readouterr().err


def test_tokens_are_long_and_never_the_same() -> None:
    tokens = {Listener().token for _ in range(10)}
    assert len(tokens) == 10
    assert all(len(token) >= 32 for token in tokens)


def test_a_port_of_the_users_own_that_is_taken_is_refused_with_its_number() -> None:
    async def test() -> None:
        first, second = Listener(), Listener()
        await first.open(LOOPBACK)
        with pytest.raises(RefusedError, match=rf"port {first.port}: cannot be bound here: .*; choose another --port"):
            await second.open(LOOPBACK, first.port)
        first.close()
        second.close()

    run(test)


def test_a_given_token_is_the_one_that_is_asked_for() -> None:
    """So that lines can be printed before the supervisor runs."""

    async def test() -> None:
        listener = Listener("printed-long-before")
        await listener.open(LOOPBACK)
        agent = await dialling(listener, "printed-long-before")
        accepted = await listener.accept()
        listener.close()
        for end in (agent, accepted):
            end.close()

    run(test)


# The first word -------------------------------------------------------------------------------------------------------


@CARRIERS
def test_what_a_shells_start_files_print_is_passed_over_up_to_the_hello(carrier) -> None:
    async def test() -> None:
        async with carrier() as (supervisor, agent):
            agent.writer.write(b'Welcome to n01!\n\xff\xfe\n\n[1, 2]\n"quoted"\n' + line({"did": "hello"}))
            await agent.send({"did": "swept"})
            await supervisor.wait_for_hello()
            assert [await supervisor.receive() for _ in range(2)] == [{"did": "hello"}, {"did": "swept"}]

    run(test)


@CARRIERS
@pytest.mark.parametrize(
    ("chatter", "said"),
    [
        (b"y\n" * CHATTER_LINES, "no hello among what it said"),
        (b"Welcome to n01!\n", "the connection ended"),
        (b"", "the connection ended"),
    ],
)
def test_one_who_says_no_hello_is_given_up(carrier, chatter: bytes, said: str) -> None:
    async def test() -> None:
        async with carrier() as (supervisor, agent):
            agent.writer.write(chatter)
            await agent.writer.drain()
            agent.close()
            with pytest.raises(ChannelClosed) as caught:
                await supervisor.wait_for_hello()
            assert str(caught.value) == said

    run(test)


# Without waiting ------------------------------------------------------------------------------------------------------


@CARRIERS
def test_what_is_posted_to_one_that_takes_nothing_does_not_hold_up_the_sender(carrier) -> None:
    message = {"padding": "x" * 1_000_000}

    async def test() -> None:
        async with carrier() as (supervisor, agent):
            for _ in range(5):  # beyond what any buffer of the kernel's holds, and nobody reads
                supervisor.post(message)
            supervisor.post({"do": "bye"})
            assert [await agent.receive() for _ in range(5)] == [message] * 5
            assert await agent.receive() == {"do": "bye"}

    run(test)


@CARRIERS
def test_posting_to_an_end_that_was_closed_is_said(carrier) -> None:
    async def test() -> None:
        async with carrier() as (supervisor, _):
            supervisor.close()
            with pytest.raises(ChannelClosed, match="the connection ended"):
                supervisor.post({"do": "bye"})

    run(test)


@CARRIERS
def test_aborting_does_not_wait_for_one_that_takes_nothing(carrier) -> None:
    async def test() -> None:
        async with carrier() as (supervisor, agent):
            for _ in range(5):
                supervisor.post({"padding": "x" * 1_000_000})
            supervisor.abort()
            with pytest.raises(ChannelClosed):
                await receive_for_ever(agent)

    run(test)


def test_a_message_is_one_line_of_ascii() -> None:
    """So that a carrier may be anything that hands on bytes, and a person may read along."""

    async def test() -> None:
        reading, writing = os.pipe()
        unused_read, unused_write = os.pipe()
        end = await over_descriptors(unused_read, writing)
        await end.send({"text": "größe\n"})
        line = os.read(reading, 1 << 16)
        assert line.isascii()
        assert (line.count(b"\n"), json.loads(line)) == (1, {"text": "größe\n"})
        os.close(reading)
        os.close(unused_write)
        end.close()
        await closed_for_good(end)

    run(test)
