"""The control channel over its two carriers: what goes in comes out, and every kind of bad end is said."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.jobs.basics.handshake import node_key
from muster.launch.agent import dial, hello, line
from muster.launch.wire.channel import LINE_BYTES, Channel, ChannelClosed, NotAMessage, over_pipes, over_socket, quoted
from muster.launch.wire.listener import Listener
from muster.launch.wire.messages import Bye, Held, Log, Start, Swept
from support.agents import DEADLINE_S, LOOPBACK

Ends = tuple[Channel, Channel]


async def closed_for_good(*ends: Channel) -> None:
    """Wait until asyncio, in later turns of its loop, has closed the descriptors of pipes."""
    for end in ends:
        for transport in (end.writer.transport, end.source):
            while not transport.get_extra_info("pipe").closed:
                await asyncio.sleep(0)


async def over_descriptors(reading: int, writing: int, *, node: int | None = None) -> Channel:
    """Make an end over two descriptors, which it owns from now on."""
    return await over_pipes(os.fdopen(reading, "rb", 0), os.fdopen(writing, "wb", 0), node=node)


@asynccontextmanager
async def piped() -> AsyncIterator[Ends]:
    """Two ends over two pipes, as between the supervisor and an agent that it started."""
    down_read, down_write = os.pipe()
    up_read, up_write = os.pipe()
    ends = await over_descriptors(up_read, down_write, node=0), await over_descriptors(down_read, up_write)
    try:
        yield ends
    finally:
        for end in ends:
            end.close()
        await closed_for_good(*ends)


async def dialling(listener: Listener) -> Channel:
    """Dial as the agent of node 0 does, and return its end."""
    key = node_key(listener.secret, 0)
    return await over_socket(await asyncio.to_thread(dial, listener.addresses, 0, key, DEADLINE_S))


@asynccontextmanager
async def dialled() -> AsyncIterator[Ends]:
    """Two ends over TCP: the supervisor's listener, and an agent that has dialled it."""
    listener = Listener(1, run="run-1", report=print)
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


async def is_closed(end: Channel) -> str:
    """Return what an end says when its other one is expected to be gone."""
    with pytest.raises(ChannelClosed) as caught:
        await end.receive()
    return str(caught.value)


async def send_for_ever(end: Channel) -> None:
    """Send until it is refused: the kernel takes the first bytes, and says so only after that."""
    while True:
        await end.send(started({"padding": "x" * 100_000}))


async def send_logs_for_ever(end: Channel) -> None:
    """Send as an agent whose rank prints without end."""
    while True:
        await end.send(printed("x" * 100_000))


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


def started(*ranks: dict[str, Any]) -> Start:
    """A start message: the one that carries JSON of any kind."""
    return Start(
        attempt=0,
        node=0,
        attempt_dir="/runs/run-1/attempt-000",
        apart=False,
        workdir="/",
        setup=(),
        store=True,
        master_port=1,
        warm={"preload": "", "env": {}, "python": ()},
        console=(),
        ranks=ranks,
    )


def printed(*lines: str) -> Log:
    return Log(0, 0, "out", lines)


@CARRIERS
@settings(max_examples=25, deadline=None)
@given(
    down=st.lists(st.lists(st.dictionaries(st.text(), JSON, max_size=4), max_size=3), min_size=1, max_size=4),
    up=st.lists(st.lists(st.text(), max_size=4), min_size=1, max_size=4),
)
def test_messages_arrive_whole_and_in_order_both_ways(
    carrier, down: list[list[dict[str, Any]]], up: list[list[str]]
) -> None:
    async def test() -> None:
        async with carrier() as (supervisor, agent):
            orders, news = [started(*ranks) for ranks in down], [printed(*lines) for lines in up]
            for sender, receiver, messages in ((supervisor, agent, orders), (agent, supervisor, news)):
                for message in messages:
                    await sender.send(message)
                assert [await receiver.receive() for _ in messages] == messages

    asyncio.run(asyncio.wait_for(test(), DEADLINE_S))


@CARRIERS
@pytest.mark.parametrize("text", ["line\nline\r\n\x00\x1f", "größe \u2028 🚀", "\ud800 alone", '"}\n{"', ""])
async def test_text_of_any_kind_stays_one_message(carrier, text: str) -> None:
    async with carrier() as (supervisor, agent):
        await supervisor.send(started({text: [text]}))
        assert await agent.receive() == started({text: [text]})
        await agent.send(printed(text))
        assert await supervisor.receive() == printed(text)


@CARRIERS
async def test_a_start_message_of_a_large_node_is_no_trouble(carrier) -> None:
    message = started(*({"rank": rank, "env": {"X": "x" * 10_000}} for rank in range(256)))
    async with carrier() as (supervisor, agent):
        _, received = await asyncio.gather(supervisor.send(message), agent.receive())
        assert received == message


# Ends -----------------------------------------------------------------------------------------------------------------


@CARRIERS
async def test_what_was_sent_before_the_other_end_went_still_arrives_then_it_is_closed(carrier) -> None:
    async with carrier() as (supervisor, agent):
        await agent.send(Swept(0, 0, ()))
        agent.close()
        assert await supervisor.receive() == Swept(0, 0, ())
        assert await is_closed(supervisor) == "the connection ended"


@CARRIERS
async def test_sending_to_an_end_that_has_gone_is_closed_not_an_error_of_the_system(carrier) -> None:
    async with carrier() as (supervisor, agent):
        agent.close()
        await is_closed(supervisor)
        with pytest.raises(ChannelClosed):
            await send_for_ever(supervisor)


@CARRIERS
@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"message": "Hel', "the connection ended"),  # torn: its sender was killed
        # a login script that prints
        (b"Welcome to n01!\n", "expected JSON: Expecting value: line 1 column 1 (char 0)"),
        (b"\xff\xfe\n", None),
        (b"[1, 2]\n", None),
        (b'{"message": "Beat", "sent": 1}\n', None),  # it goes the other way
        (b'{"message": "Held", "attempt": 0, "steps": -1}\n', None),
        (b"\n", None),
        (b"[" * 100_000 + b"\n", "expected JSON: nested deeper than 64 levels"),
    ],
)
async def test_a_line_that_is_no_message_closes_the_channel(carrier, line: bytes, said: str | None) -> None:
    async with carrier() as (supervisor, agent):
        agent.writer.write(line)
        if not line.endswith(b"\n"):
            agent.close()
        text = await is_closed(supervisor)
        assert text
        assert said in (None, text)


@CARRIERS
@pytest.mark.parametrize("end", [b"\n", b""])  # whole, or without an end in sight
async def test_a_line_beyond_the_limit_closes_the_channel_instead_of_filling_the_memory(
    carrier, end: bytes, monkeypatch
) -> None:
    monkeypatch.setattr("muster.launch.wire.channel.LINE_BYTES", 1 << 10)
    async with carrier() as (supervisor, agent):
        agent.writer.write(b"x" * (1 << 14) + end)
        with pytest.raises(NotAMessage, match="its line is too long"):
            await supervisor.receive()


@CARRIERS
async def test_one_who_reads_nothing_of_what_is_not_awaited_holds_little_memory(carrier) -> None:
    """Nobody receives: what the other end sends stays in the kernel, beyond twice the limit of a line."""
    async with carrier() as (supervisor, agent):
        sending = asyncio.create_task(send_logs_for_ever(agent))
        limit = 2 * supervisor.reader._limit  # type: ignore[attr-defined]
        while not agent.writer.transport.get_write_buffer_size():
            await asyncio.sleep(0)
        assert len(supervisor.reader._buffer) <= limit + (1 << 18)  # type: ignore[attr-defined]
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        agent.abort()


# The first word -------------------------------------------------------------------------------------------------------


@CARRIERS
@pytest.mark.parametrize("between", [b"", b"done\n", b"\x1b[0m", b"[1]+  Done\n\x1b]0;n01\x07"])
@pytest.mark.parametrize(
    "before",
    [
        b'Welcome to n01!\n\xff\xfe\n\n[1, 2]\n"quoted"\n',
        b"\x1b]0;n01\x07",
        b"motd\n\x1b[31m",
        b'{"message": "Hello"} {"message": ',
        b"y\n" * 100_000 + b"y",
        bytes(LINE_BYTES + 1),
    ],
    ids=["lines", "title", "colour", "json", "many lines", "one long line"],
)
async def test_what_a_shells_start_files_print_is_passed_over(carrier, before: bytes, between: bytes) -> None:
    """The text may precede a message, follow it, or share its line."""
    async with carrier() as (supervisor, agent):
        agent.writer.write(before + line(hello("10.0.0.1")))
        agent.writer.write(between)
        waiting = asyncio.create_task(supervisor.wait_for_hello())  # nobody else reads a large noise
        await agent.send(Swept(0, 0, ()))
        await waiting
        assert (await supervisor.receive_hello()).address == "10.0.0.1"
        assert await supervisor.receive() == Swept(0, 0, ())


@CARRIERS
async def test_one_whose_first_message_is_no_hello_is_refused(carrier) -> None:
    async with carrier() as (supervisor, agent):
        await agent.send(Held(0, 3))
        with pytest.raises(NotAMessage, match="expected Hello, got Held"):
            await supervisor.receive_hello()


@CARRIERS
@pytest.mark.parametrize(
    ("chatter", "said"),
    [
        (b"Password: ", "the connection ended"),
        (b"Welcome to n01!\n", "the connection ended"),
        (b"", "the connection ended"),
    ],
)
async def test_one_who_says_no_hello_is_given_up(carrier, chatter: bytes, said: str) -> None:
    async with carrier() as (supervisor, agent):
        agent.writer.write(chatter)
        await agent.writer.drain()
        agent.close()
        with pytest.raises(ChannelClosed) as caught:
            await supervisor.wait_for_hello()
        assert str(caught.value) == said
        assert supervisor.printed == chatter


async def test_one_who_prints_without_end_is_refused_with_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("muster.launch.wire.channel.CHATTER_BYTES", 1 << 20)
    async with piped() as (supervisor, agent):
        agent.writer.write(b"y\n" * (1 << 20))
        with pytest.raises(NotAMessage, match=r"its shell printed more than 1 MB; printed so far: ….* / y"):
            await supervisor.wait_for_hello()
        agent.abort()


def test_printed_text_is_quoted_safely_and_in_one_line() -> None:
    assert quoted(b"\x1b]0;n1\x07\r\n\n  Password: ") == "; printed so far: \\x1b]0;n1\\x07 / Password:"
    assert quoted(b" \n") == ""
    assert quoted(b"x" * 1000).endswith(f": …{'x' * 200}")


# Without waiting ------------------------------------------------------------------------------------------------------


@CARRIERS
async def test_what_is_posted_to_one_that_takes_nothing_does_not_hold_up_the_sender(carrier) -> None:
    message = started({"padding": "x" * 1_000_000})
    async with carrier() as (supervisor, agent):
        for _ in range(5):  # beyond what any buffer of the kernel's holds, and nobody reads
            supervisor.post(message)
        supervisor.post(Bye(0))
        assert [await agent.receive() for _ in range(5)] == [message] * 5
        assert await agent.receive() == Bye(0)


@CARRIERS
async def test_posting_to_an_end_that_was_closed_is_said(carrier) -> None:
    async with carrier() as (supervisor, _):
        supervisor.close()
        with pytest.raises(ChannelClosed, match="the connection ended"):
            supervisor.post(Bye(0))


@CARRIERS
async def test_aborting_does_not_wait_for_one_that_takes_nothing(carrier) -> None:
    async with carrier() as (supervisor, agent):
        for _ in range(5):
            supervisor.post(started({"padding": "x" * 1_000_000}))
        supervisor.abort()
        with pytest.raises(ChannelClosed):
            await receive_for_ever(agent)


async def test_a_message_is_one_line_of_ascii() -> None:
    """So that a carrier may be anything that hands on bytes, and a person may read along."""
    reading, writing = os.pipe()
    unused_read, unused_write = os.pipe()
    end = await over_descriptors(unused_read, writing)
    await end.send(printed("größe\n"))
    line = os.read(reading, 1 << 16)
    assert line.isascii()
    told = {"message": "Log", "attempt": 0, "rank": 0, "stream": "out", "lines": ["größe\n"]}
    assert (line.count(b"\n"), json.loads(line)) == (1, told)
    os.close(reading)
    os.close(unused_write)
    end.close()
    await closed_for_good(end)
