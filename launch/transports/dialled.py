"""Transports whose agents dial back. One program starts all agents (pdsh, srun), or users paste their command lines.

The supervisor listens. The supervisor and each agent prove to each other that they hold the node's key. A `Starter`
describes the program of a transport: its command line, its environment, and how to read its error messages. An agent
that is started again has its own program; later messages of the first program about that node are ignored.
"""

import asyncio
import os
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from muster.jobs.basics.errors import MusterError
from muster.jobs.basics.files import write_secret
from muster.jobs.machine import network
from muster.jobs.runfolder.rundir import RunDir
from muster.launch.transports.base import Gate
from muster.launch.transports.child import FAREWELL_S, READING_S, Child
from muster.launch.transports.watched import NodeProcesses, watch_own
from muster.launch.wire.channel import quoted
from muster.launch.wire.keys import SECRET
from muster.launch.wire.listener import Listener

LOST_S: Final = 1.0  # time for healthy nodes' agents to end, before pdsh is ended because of lost nodes
PDSH_LINE: Final = re.compile(r"(?:pdsh@[^:]*: )?(?P<host>[^:\s]+): (?P<text>.*)")
PDSH_END: Final = re.compile(r"[Ee]xited with exit code (\d+)")
ALL: Final = -1  # stands for the program that starts all agents


@dataclass(frozen=True)
class Starter:
    """The program that starts the agents.

    `argv(connect, slot)` returns its complete command line. `connect`: the address for the agents to dial; `slot`: the
    one node whose agent is started again, None for all. `explain(name, code, errors)` returns the error for the failed
    start of node `name`, or for the end of the program itself (name "").
    """

    argv: Callable[[str, int | None], list[str]]
    environment: Mapping[str, str] = field(default_factory=dict)  # added to the environment of this process
    replaces: Mapping[str, str] | None = None  # used instead of this process's environment, if set
    prefix: str = ""  # removed from the start of its messages about a node
    # {name of a node in its messages: number of the node}, preferred names first
    names: Mapping[str, int] = field(default_factory=dict)
    explain: Callable[[str, int, Sequence[str]], MusterError] | None = None
    passes_on: Callable[[str], bool] = lambda line: False  # selects lines of its standard error to print


class Dialled:
    """A transport whose agents dial the supervisor. Without a starter, users start all agents but node 0's."""

    def __init__(
        self,
        name: str,
        nodes: int,
        *,
        run: RunDir,
        starter: Starter | None,
        towards: str = "",
        port: int = 0,
        secret: str = "",
        own_agent: Sequence[str] = (),
        listen: str = "",
        patience_s: float = 0.0,
        attempt: int = 0,
    ) -> None:
        self.name = name
        self.nodes = nodes
        self.run = run
        self.starter = starter
        self.towards = towards  # a node's address: the supervisor listens on the interface that leads to it
        self.listen = listen
        self.port = port
        self.own_agent = own_agent
        self.patience_s = patience_s
        self._listener = Listener(nodes, run=run.run_id, attempt=attempt, secret=secret, report=warn)
        self._connect = ""
        self._started = NodeProcesses()
        self._programs: dict[int, Child] = {}  # those that start agents, by place
        self._again: set[int] = set()  # nodes whose agents were started again
        self._accepting: asyncio.Task[None] | None = None

    def commands(self) -> list[list[str]]:
        """Return the starter's command line or, without a starter, that of node 0's agent, which runs here."""
        return [self.starter.argv("ADDRESS:PORT", None)] if self.starter is not None else [list(self.own_agent)]

    def printed(self, slot: int) -> str:
        """Return the end of what the program that starts a node's agent has printed, without lines of other nodes."""
        program = self._programs.get(slot if slot in self._again else ALL)
        if program is None or self.starter is None:
            return ""
        names, prefix = self.starter.names, self.starter.prefix.encode()
        lines = [line.removeprefix(prefix) for line in program.printed.split(b"\n")]
        found = [(line, PDSH_LINE.fullmatch(line.decode(errors="replace"))) for line in lines]
        return quoted(b"\n".join(line for line, of in found if of is None or names.get(of["host"], slot) == slot))

    async def start(self, gate: Gate) -> None:
        """Listen, then start the program that starts the agents."""
        route = network.route_to(self.towards) if self.towards else None
        own = network.own_addresses()
        bind = self.listen or (route[1] if route else "")
        # the address may not be one of this host's, for example behind NAT
        if not bind.startswith("127.") and bind not in (address for _, address in own):
            bind = ""
        named = [self.listen or bind] if self.listen or bind else [address for _, address in own] or [network.LOOPBACK]
        if not bind:
            warn("listening on every address of this host, because it is unknown which one the nodes can reach")
        await self._listener.open(bind, self.port, dialled_as=named)
        self._connect = ",".join(self._listener.addresses)
        if self.own_agent:
            self._listener.expected.discard(0)  # node 0's agent is connected by pipes
        self._accepting = asyncio.create_task(self._accept(gate))
        if self.own_agent:
            await self._start_own(gate)
        if self.starter is not None:
            write_secret(self.run.token, self._listener.secret)
            self._start_by(self.starter, None, gate)

    async def restart(self, slot: int, gate: Gate) -> None:
        """Start a node's agent with a program of its own. Without a starter, ask the user to paste its line again."""
        self._again.add(slot)
        await self._started.end(slot)
        if not (slot == 0 and self.own_agent):
            self._listener.expect(slot)
        if self.starter is not None:
            self._start_by(self.starter, slot, gate)
        elif slot == 0 and self.own_agent:
            await self._start_own(gate)
        else:
            print(f"muster: node {slot} is lost; paste the same line there again", file=sys.stderr)

    async def _accept(self, gate: Gate) -> None:
        while True:
            gate.connected(await self._listener.accept())

    async def _start_own(self, gate: Gate) -> None:
        child = Child(self.own_agent, piped=True, own_stderr=False)
        self._started.add(0, child, gate, partial(watch_own, 0, child))
        gate.connected(await child.channel(0))

    def _start_by(self, starter: Starter, slot: int | None, gate: Gate) -> None:
        own = os.environ if starter.replaces is None else starter.replaces
        environment = {**own, **starter.environment, SECRET: self._listener.secret}
        child, place = (
            Child(starter.argv(self._connect, slot), piped=False, env=environment),
            ALL if slot is None else slot,
        )
        self._programs[place] = child
        self._started.add(place, child, gate, partial(self._watch, starter, child, place))

    async def _watch(self, starter: Starter, child: Child, place: int, gate: Gate) -> None:
        """Report failures of single nodes as the starter prints them. After its end, report every node as failed."""
        lines: asyncio.Queue[str] = asyncio.Queue()
        reading = asyncio.create_task(child.read_errors(lines))
        said: dict[int, list[str]] = {}
        called = {number: name for name, number in reversed(list(starter.names.items()))}
        while not child.ended.done() or not lines.empty():
            line = asyncio.ensure_future(lines.get())
            either: list[asyncio.Future[Any]] = [line, child.ended]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not line.done():
                line.cancel()
                await asyncio.wait([reading], timeout=READING_S)
                continue
            if starter.passes_on(line.result()):
                print(line.result(), file=sys.stderr, flush=True)
            found = PDSH_LINE.fullmatch(line.result().removeprefix(starter.prefix))
            if found is None or found["host"] not in starter.names:
                continue
            node = starter.names[found["host"]]
            about = said.setdefault(node, [])
            about.append(found["text"])
            if (end := PDSH_END.search(found["text"])) and starter.explain and self._speaks_for(place, node):
                gate.failed(node, starter.explain(called[node], int(end[1]), about[:-1] or child.errors[:-1]))
        code = child.ended.result()
        for node in range(self.nodes):
            if starter.explain and self._speaks_for(place, node):
                gate.failed(node, starter.explain(called.get(node, ""), code, said.get(node) or child.errors))

    def _speaks_for(self, place: int, node: int) -> bool:
        """Return whether this node's newest agent was started by the program for `place` (a node, or ALL)."""
        return place == (node if node in self._again else ALL)

    async def close(self, lost: Collection[int]) -> None:
        """Stop listening, and wait for the started programs to end. Wait only briefly for pdsh if a node is lost."""
        self._listener.close()
        self.run.token.unlink(missing_ok=True)

        def wait_s(place: int) -> float:
            if place != ALL:
                return LOST_S if place in lost else FAREWELL_S
            in_vain = self.starter is not None and self.starter.names and (lost or self._again)
            return LOST_S if in_vain else FAREWELL_S

        await self._started.close(wait_s)
        if self._accepting is not None:
            self._accepting.cancel()


def warn(text: str) -> None:
    """Print a warning of the transport."""
    print(f"muster: {text}", file=sys.stderr)
