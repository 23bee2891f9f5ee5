"""A run whose agents are coroutines of this process, over real TCP connections and the real handshake."""

import asyncio
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

from muster.jobs.basics.handshake import AgentSide, node_key
from muster.jobs.hosts.placement import Host
from muster.jobs.runfolder.rundir import RunDir, make_run
from muster.jobs.spec.failover import RestartSettings
from muster.jobs.spec.job import CommandSettings, Job
from muster.jobs.spec.site import Site
from muster.launch.common.fingerprint import fingerprint
from muster.launch.plan.plan import Context
from muster.launch.plan.spares import place_with_spares
from muster.launch.records.verdict import Verdict
from muster.launch.supervision.console import Console
from muster.launch.supervision.supervisor import Supervisor
from muster.launch.transports.base import Gate
from muster.launch.wire import messages as wire
from muster.launch.wire.channel import START_BYTES
from muster.launch.wire.codec import decode, encode
from muster.launch.wire.listener import Listener
from support.messages import exited, hello

LOOPBACK = "127.0.0.1"
RANKS = 2  # of a node
DEADLINE_S = 20.0

Lines = Iterable[bytes]


def supervisor(folder: Path, transport: Any, *, nodes: int = 2, spares: int = 1, restarts: int = 3) -> Supervisor:
    """The supervisor of nodes n0, n1, ... with two ranks each, which run a function of ours."""
    job = Job(
        name="demo",
        kind="command",
        nodes=nodes,
        ranks_per_node=RANKS,
        restart=RestartSettings.model_validate({"max": restarts, "spares": spares}),
        settings=CommandSettings(argv=["true"]),
    )
    hosts = [Host(f"n{number}", f"10.10.1.{number + 1}") for number in range(nodes + spares)]
    run = RunDir(folder / "demo-20250101T000000.000Z-abc123")
    make_run(run)
    placement, spare = place_with_spares(job, hosts)
    context = Context(job, Site(), placement, run, "/srv", "/opt/python", "m:f", remote=True, spares=spare)
    return Supervisor(context, transport, Console())


class FakeAgent:
    """One node's agent. It behaves, but for `first`, sent in place of its hello, and for `odd`.

    `odd(moment)` returns lines to send beside what is right: at "greeted", "prepared", "reached", "started" and
    "stopping" of attempt 0. Its ranks run until they are stopped; those of a later attempt, or with `ends` of any, end
    well at once.
    """

    def __init__(
        self, node: int, odd: Callable[[str], Lines] = lambda moment: (), *, first: bytes = b"", ends: bool = False
    ) -> None:
        self.node = node
        self.ends = ends
        self.odd = odd
        self.first = first
        self.heard: list[wire.ToAgent] = []
        self.running: list[int] = []
        self.ahead_s = 0.0  # its clock minus the supervisor's

    async def live(self, address: str, key: str) -> None:
        """Dial, prove, and serve to the end of the connection."""
        host, _, port = address.partition(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=START_BYTES)
        try:
            end = AgentSide(key, self.node, address)
            writer.write(end.greeting())
            writer.write(end.answer(await reader.readline()))
            end.check_welcome(await reader.readline())
            writer.write(self.first or encode(hello(host=f"n{self.node}", time=time.time())))
            writer.writelines(self.odd("greeted"))
            while line := await reader.readline():
                message = decode(line, wire.TO_AGENT)
                self.heard.append(message)
                writer.writelines(self.answer(message))
                await writer.drain()
        except ConnectionError:
            pass  # it was hung up on
        finally:
            writer.close()

    def answer(self, message: wire.ToAgent) -> Lines:
        """Return what an agent says to an order."""
        now = time.time() + self.ahead_s
        match message:
            case wire.Beat():
                yield encode(wire.Heartbeat(0, message.sent, now, now))
            case wire.Prepare():
                yield encode(wire.Prepared(message.attempt, 4242, message.bind, (("eth1", "10.10.1.1"),)))
                yield from self.odd("prepared") if message.attempt == 0 else ()
            case wire.Reach():
                reached = ("eth1", f"10.10.1.{self.node + 1}", "", fingerprint(), "shared", message.run, "")
                yield encode(wire.Reached(message.attempt, *reached))
                yield from self.odd("reached") if message.attempt == 0 else ()
            case wire.Start():
                yield from self.start(message, now)
            case wire.StopRanks():
                yield from self.odd("stopping") if message.attempt == 0 else ()
                for rank in self.running:
                    yield encode(
                        exited(rank, None, signal="SIGTERM", sent="SIGTERM", ended=now, attempt=message.attempt)
                    )
                self.running = []
                yield encode(wire.Swept(message.attempt, 0, ()))

    def start(self, message: wire.Start, now: float) -> Lines:
        """Say that the ranks have begun, and have met."""
        self.running = [each["rank"] for each in message.ranks]
        started = tuple((rank, 1_000_000 + rank, 1) for rank in self.running)
        yield encode(wire.Started(message.attempt, started, now))
        for report in ("arrived", "joined"):
            for rank in self.running:
                yield encode(wire.Report(message.attempt, (rank,), {"report": report}))  # type: ignore[typeddict-item, arg-type]
        if message.attempt == 0:
            yield from self.odd("started")
        if message.attempt or self.ends:
            for rank in self.running:
                yield encode(exited(rank, 0, ended=now, attempt=message.attempt))
            self.running = []


class FakeAgents:
    """A transport whose agents are coroutines; one that is started again behaves."""

    name = "ssh"
    patience_s = 0.0

    def __init__(self, *agents: FakeAgent) -> None:
        self.agents = {agent.node: agent for agent in agents}
        self.reported: list[str] = []
        self._listener = Listener(len(agents), run="run-1", report=self.reported.append)
        self._tasks: set[asyncio.Task[None]] = set()

    def commands(self) -> list[list[str]]:
        return []

    async def start(self, gate: Gate) -> None:
        await self._listener.open(LOOPBACK)
        self._tasks.add(asyncio.create_task(self._accept(gate)))
        for agent in self.agents.values():
            self._begin(agent)

    def printed(self, slot: int) -> str:
        return ""

    async def restart(self, slot: int, gate: Gate) -> None:
        self._listener.expect(slot)
        self.agents[slot] = FakeAgent(slot, ends=True)
        self._begin(self.agents[slot])

    async def close(self, lost: Collection[int]) -> None:
        self._listener.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _begin(self, agent: FakeAgent) -> None:
        key = node_key(self._listener.secret, agent.node)
        self._tasks.add(asyncio.create_task(agent.live(self._listener.addresses[0], key)))

    async def _accept(self, gate: Gate) -> None:
        while True:
            gate.connected(await self._listener.accept())


def live(folder: Path, *agents: FakeAgent, **fields: Any) -> tuple[Verdict, Supervisor]:
    """Let a run live to its end; nothing may be raised."""

    async def guarded() -> tuple[Verdict, Supervisor]:
        made = supervisor(folder, FakeAgents(*agents), **fields)
        return await asyncio.wait_for(made.run(), DEADLINE_S), made

    return asyncio.run(guarded())
