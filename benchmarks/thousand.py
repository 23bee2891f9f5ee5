"""What `starts.py thousand` runs: a real supervisor of thousands of nodes, and the stub that is all of their agents.

    python thousand.py supervise JOB RUNS NODES RANKS_PER_NODE STORY
    python thousand.py agents ADDRESS:PORT NODES RANKS_PER_NODE CODE STORY      (the secret comes in MUSTER_SECRET)

The stub is one process with a connection for each node, which speaks the agents' protocol. Its ranks join, work for
WORK_S while heartbeats are answered, and then rank 0 fails. The other ranks end when their node is told to stop. The
stub writes its times to the file STORY: when the last node was started, the supervisor's share of a core while the
ranks worked, when rank 0 failed, and when the last node was told. Because one process does the work of all nodes, it
prepares what they say about their ranks, and all but one node in READ_EVERY recognise two orders by their first bytes.
"""

import argparse
import asyncio
import json
import os
import resource
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from muster.jobs.basics.handshake import AgentSide, node_key
from muster.launch.agent import DIAL_PAUSE_S
from muster.launch.common.limits import raise_open_files
from muster.launch.wire.channel import START_BYTES
from muster.launch.wire.codec import decode, encode
from muster.launch.wire.keys import SECRET
from muster.launch.wire.messages import (
    TO_AGENT,
    Beat,
    Bye,
    Exited,
    Exits,
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
    StopRanks,
    Swept,
)
from muster.launch.wire.records import Progress

STORE, OWN = "10.99.0.1", "10.99.0.2"  # addresses that the nodes are said to have
WORK_S = 10.0
START, STOP = b'{"message": "Start"', b'{"message": "StopRanks"'
READ_EVERY = 100  # one node in a hundred reads these orders, and checks them
ENDED = 7777777777.25  # replaced by the time when the ranks of a node were stopped
ENDED_TEXT = str(ENDED).encode()
TICKS = os.sysconf("SC_CLK_TCK")


def hello(node: int) -> Hello:
    """Return the greeting of a node of eight cores."""
    return Hello(
        host=f"stub{node:05d}",
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


def beginning(ranks: range, now: float) -> bytes:
    """Return what a node says whose ranks arrive and join."""
    said: list[FromAgent] = [Started(0, tuple((number, 2 + number, 1) for number in ranks), now)]
    said += [Report(0, tuple(ranks), {"report": "arrived"}), Report(0, tuple(ranks), {"report": "joined"})]
    return b"".join(map(encode, said))


def ending(ranks: range) -> bytes:
    """Return what a node says whose ranks are stopped, with ENDED for the time."""
    exits = tuple(ended(0, rank, ENDED, None, "SIGTERM") for rank in ranks)
    return b"".join(map(encode, (Exits(0, exits), Swept(0, len(exits), ()))))


def ended(attempt: int, rank: int, now: float, code: int | None, sent: str | None) -> Exited:
    """Return what a node says about a rank that failed, or that was stopped by a signal."""
    return Exited(attempt, rank, code, sent, sent, now, {}, None, ())


def progress(ranks: range, *, each: bool) -> Progress:
    """Return the progress of a node whose ranks work, as an agent does: that of every rank if it was asked for."""
    told: dict[str, Any] = {}
    for rank in ranks if each else ():
        told[str(rank)] = {"phase": "run", "steps": 41, "beats_age_s": 0.2, "state": ""}
    common = {"steps": 41, "beats_age_s": 0.2, "slowest_s": 0.1, "sessions": len(ranks), "output_age_s": None}
    return {**common, "phases": ("run",), "ranks": told}  # type: ignore[typeddict-item]


def cpu_s(pid: int) -> float:
    """Return the processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


@dataclass
class Stub:
    """All agents of a run. `times`: what happened when, in Unix seconds."""

    nodes: int
    ranks: int
    code: str
    started: int = 0
    told: int = 0
    times: dict[str, float] = field(default_factory=dict)
    all_started: asyncio.Event = field(default_factory=asyncio.Event)
    failing: asyncio.Task[None] | None = None

    async def dial(self, node: int, dialled: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
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

    async def agent(self, node: int, dialled: str) -> None:
        """Speak the agent's side of the protocol for a node."""
        reader, writer = await self.dial(node, dialled)
        running, own = range(0), range(node * self.ranks, (node + 1) * self.ranks)
        begun, stopped = beginning(own, time.time()), ending(own[not node :])

        def tell(*messages: FromAgent) -> None:
            writer.write(b"".join(map(encode, messages)))

        tell(hello(node))
        while line := await reader.readline():
            if line.startswith(START) and node % READ_EVERY:
                writer.write(begun)
                running = own
                self.count_start()
                continue
            if line.startswith(STOP) and node % READ_EVERY:
                self.count_stop()
                writer.write(stopped.replace(ENDED_TEXT, str(time.time()).encode()))
                running = range(0)
                continue
            message, now = decode(line, TO_AGENT), time.time()
            match message:
                case Bye():
                    return
                case Beat():
                    told = progress(running, each=message.ranks) if running else None
                    tell(Heartbeat(0, message.sent, now, now, told))
                case Prepare():
                    tell(Prepared(message.attempt, 4242, STORE, (("eth1", STORE),)))
                case Reach():
                    tell(Reached(message.attempt, "eth1", OWN, "", self.code, "shared", message.run, ""))
                case Start():
                    assert [each["rank"] for each in message.ranks] == [*own]
                    writer.write(begun)
                    running = own
                    self.count_start()
                    if node == 0:
                        self.failing = asyncio.create_task(self.fail(tell))
                case StopRanks():
                    self.count_stop()
                    writer.write(stopped.replace(ENDED_TEXT, str(now).encode()))
                    running = range(0)

    def count_start(self) -> None:
        self.started += 1
        if self.started == self.nodes:
            self.times["started"] = time.time()
            self.all_started.set()

    def count_stop(self) -> None:
        self.told += 1
        if self.told == self.nodes:
            self.times["told"] = time.time()

    async def fail(self, tell: Any) -> None:
        """Let all ranks work for a time, then rank 0 fails."""
        await self.all_started.wait()
        await asyncio.sleep(WORK_S)  # the reports of the start are handled
        supervisor, before, began = os.getppid(), cpu_s(os.getppid()), time.monotonic()
        await asyncio.sleep(WORK_S)
        self.times["cores"] = (cpu_s(supervisor) - before) / (time.monotonic() - began)
        self.times["failed"] = time.time()
        tell(ended(0, 0, self.times["failed"], 1, None))


async def agents(dialled: str, nodes: int, ranks: int, code: str, story: str) -> None:
    """Be all agents."""
    raise_open_files()
    stub = Stub(nodes, ranks, code)
    await asyncio.gather(*(stub.agent(node, dialled) for node in range(nodes)))
    Path(story).write_text(json.dumps(stub.times))


def supervise(job: str, runs: str, nodes: int, ranks: int, story: str) -> int:
    """Run the job against the stub, in this process; print the memory, and how long the plan took."""
    from muster.launch.commands import run
    from muster.launch.common.fingerprint import fingerprint
    from muster.launch.common.options import given
    from muster.launch.submit.prepare import prepare
    from muster.launch.submit.request import Request
    from muster.launch.submit.start import write_run
    from muster.launch.supervision.console import Console
    from muster.launch.supervision.supervisor import Supervisor
    from muster.launch.transports.dialled import Dialled, Starter

    began = time.monotonic()
    parser = argparse.ArgumentParser()
    run.configure(parser)
    args = parser.parse_args([job, "--runs", runs, "-w", f"stub[00000-{nodes - 1:05d}]", "--on", "pdsh"])
    prepared = prepare(given(args, Request))
    write_run(prepared)
    planned_s = time.monotonic() - began

    def argv(connect: str, slot: int | None) -> list[str]:
        assert slot is None, "no node is lost"
        return [sys.executable, __file__, "agents", connect, str(nodes), str(ranks), fingerprint(), story]

    transport = Dialled("stub", nodes, run=prepared.context.run, starter=Starter(argv=argv), towards="127.0.0.1")
    context = replace(prepared.context, remote=True)
    code = asyncio.run(Supervisor(context, transport, Console(quiet=True)).run()).code
    memory_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"memory_mb": memory_mb, "planned_s": planned_s, "run": str(prepared.context.run.path)}))
    return 0 if code == 1 else 1


if __name__ == "__main__":
    what, where, *words = sys.argv[1:]
    if what == "agents":
        asyncio.run(agents(where, int(words[0]), int(words[1]), words[2], words[3]))
    else:
        sys.exit(supervise(where, words[0], int(words[1]), int(words[2]), words[3]))
