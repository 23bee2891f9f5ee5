"""A stub for benchmarks/thousand_nodes.py: one process that is a thousand agents, each on a connection of its own.

python thousand_stub.py ADDRESS:PORT NODES RANKS_PER_NODE CODE        (the secret comes in MUSTER_SECRET)
"""

import asyncio
import os
import sys
import time

from muster.launch.agent import DIAL_PAUSE_S
from muster.launch.wire.channel import START_BYTES
from muster.launch.wire.codec import decode, encode
from muster.launch.wire.handshake import AgentSide, node_key
from muster.launch.wire.keys import SECRET
from muster.launch.wire.messages import (
    TO_AGENT,
    Beat,
    Bye,
    Exited,
    FromAgent,
    Heartbeat,
    Hello,
    Prepare,
    Prepared,
    Reach,
    Reached,
    Report,
    Start,
    Started,
)

STORE, OWN = "10.99.0.1", "10.99.0.2"  # addresses that the nodes are said to have


def hello(node: int) -> Hello:
    """Return the greeting of a node of eight cores."""
    return Hello(
        host=f"stub{node:04d}",
        pid=1,
        pid_start=1,
        slurm_name="",
        address=STORE,
        python="3.11.0",
        torch=True,
        cores=tuple(range(8)),
        gpus=(),
        environ={"PATH": "/usr/bin"},
        time=time.time(),
    )


def life(start: Start, ranks: int, now: float) -> list[FromAgent]:
    """Return what a node says whose ranks arrive, join and end well."""
    numbers = [each["rank"] for each in start.ranks]
    assert len(numbers) == ranks
    attempt = start.attempt
    said: list[FromAgent] = [Started(attempt, tuple((number, 2 + number, 1) for number in numbers), now)]
    said += [Report(attempt, number, {"report": "arrived"}) for number in numbers]
    said += [Report(attempt, number, {"report": "joined"}) for number in numbers]
    said += [Exited(attempt, number, 0, None, None, now, {}, None, ()) for number in numbers]
    return said


async def dial(node: int, dialled: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect, and let both ends prove themselves; again where the supervisor hangs up, as agents do."""
    address, _, port = dialled.partition(":")
    while True:
        reader, writer = await asyncio.open_connection(address, int(port), limit=START_BYTES)
        end = AgentSide(node_key(os.environ[SECRET], node), node, dialled)
        writer.write(end.greeting())
        try:
            answer = await reader.readline()
        except ConnectionError:
            answer = b""
        if answer:
            writer.write(end.answer(answer))
            if welcome := await reader.readline():
                end.check_welcome(welcome)
                return reader, writer
        writer.close()
        await asyncio.sleep(DIAL_PAUSE_S)


async def agent(node: int, ranks: int, dialled: str, code: str) -> None:
    """Speak the agent's side of the protocol for a node."""
    reader, writer = await dial(node, dialled)

    def tell(*messages: FromAgent) -> None:
        writer.write(b"".join(map(encode, messages)))

    tell(hello(node))
    while line := await reader.readline():
        message, now = decode(line, TO_AGENT), time.time()
        match message:
            case Bye():
                return
            case Beat():
                tell(Heartbeat(0, message.sent, now, now))
            case Prepare():
                tell(Prepared(message.attempt, 4242, STORE, (("eth1", STORE),)))
            case Reach():
                tell(Reached(message.attempt, "eth1", OWN, "", code, "shared", message.run, ""))
            case Start():
                tell(*life(message, ranks, now))


async def main() -> None:
    """Be all agents."""
    nodes, ranks, code = int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    await asyncio.gather(*(agent(node, ranks, sys.argv[1], code) for node in range(nodes)))


if __name__ == "__main__":
    asyncio.run(main())
