"""What `starts.py thousand` runs: a real supervisor of a thousand nodes, and the stub that is all of their agents.

    python thousand.py supervise JOB RUNS NODES RANKS_PER_NODE
    python thousand.py agents ADDRESS:PORT NODES RANKS_PER_NODE CODE        (the secret comes in MUSTER_SECRET)

The stub is one process with a connection for each node, which speaks the agents' protocol.
"""

import argparse
import asyncio
import json
import os
import resource
import sys
import time
from dataclasses import replace

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


async def agents(dialled: str, nodes: int, ranks: int, code: str) -> None:
    """Be all agents."""
    await asyncio.gather(*(agent(node, ranks, dialled, code) for node in range(nodes)))


def supervise(job: str, runs: str, nodes: int, ranks: int) -> int:
    """Run the job against the stub, in this process."""
    from muster.launch.commands import run
    from muster.launch.common.fingerprint import fingerprint
    from muster.launch.common.options import given
    from muster.launch.submit.prepare import prepare
    from muster.launch.submit.request import Request
    from muster.launch.submit.start import write_run
    from muster.launch.supervision.console import Console
    from muster.launch.supervision.supervisor import Supervisor
    from muster.launch.transports.dialled import Dialled, Starter

    parser = argparse.ArgumentParser()
    run.configure(parser)
    args = parser.parse_args([job, "--runs", runs, "-w", f"stub[0000-{nodes - 1:04d}]", "--on", "pdsh"])
    prepared = prepare(given(args, Request))
    write_run(prepared)

    def argv(connect: str) -> list[str]:
        return [sys.executable, __file__, "agents", connect, str(nodes), str(ranks), fingerprint()]

    transport = Dialled("stub", nodes, run=prepared.context.run, starter=Starter(argv=argv), towards="127.0.0.1")
    context = replace(prepared.context, remote=True)
    code = asyncio.run(Supervisor(context, transport, Console(quiet=True)).run()).code
    print(json.dumps({"memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}))
    return code


if __name__ == "__main__":
    what, where, *words = sys.argv[1:]
    if what == "agents":
        asyncio.run(agents(where, int(words[0]), int(words[1]), words[2]))
    else:
        sys.exit(supervise(where, words[0], int(words[1]), int(words[2])))
