"""Ask every node of a job about its hardware, software and network. No rank is started.

    hello ──→ three heartbeats (for its clock), the facts about the node, the run folder and a nonce in it
    node 0 ──→ binds a port as for a run ──→ every node tries to reach it

A node that has not answered by the deadline is reported. `Inspection` implements the transports' `Gate` interface
(transports/base.py).
"""

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from muster.jobs.basics.errors import MusterError, RefusedError, UnreachableError
from muster.jobs.basics.files import write_text
from muster.launch.check.judges import Answer
from muster.launch.plan.plan import Context
from muster.launch.plan.program import needs
from muster.launch.supervision.master import own_address
from muster.launch.supervision.run_nodes import ClockOffset
from muster.launch.supervision.startup import prepare_message
from muster.launch.transports.base import Transport
from muster.launch.wire.channel import Channel, ChannelClosed, NotAMessage
from muster.launch.wire.messages import Beat, Broken, Bye, FromAgent, Heartbeat, Inspect, Inspected, Prepared

LIMIT_S: Final = 9.0  # for the whole inspection, so that the report appears within 10 s
BEAT_S: Final = 1.0
BEATS: Final = 3  # beats sent together; the fastest reply gives the best clock offset
PATH_MAX: Final = 4096  # Linux's limit on the length of a path
QUESTIONS: Final = 3  # per node


class Inspection:
    """One inspection of all nodes of a placement. The run folder exists already."""

    def __init__(self, context: Context, transport: Transport, names: Sequence[str]) -> None:
        self.context = context
        self.transport = transport
        self.answers = [Answer(name) for name in names]
        self.master = ""  # "address:port" once node 0 has bound it
        self.nonce = secrets.token_hex(16)
        self._clocks = [ClockOffset() for _ in names]
        self._answered = [0] * len(names)  # number of answered questions per node
        self._opened: list[Channel] = []
        self._channels: dict[int, Channel] = {}  # channels of the nodes that have said hello
        self._tasks: set[asyncio.Task[None]] = set()
        self._missing = set(range(len(names)))
        self._all_done = asyncio.Event()
        self._refused: MusterError | None = None

    async def run(self, show: Callable[[], None]) -> None:
        """Ask all nodes, call `show` when all have answered or the time is up, then dismiss the agents.

        Raises:
            MusterError: if no agent can be started at all, or the run folder cannot be written.
        """
        write_text(self.context.run.nonce("supervisor"), self.nonce)
        try:
            self._spawn(self._start())
            self._spawn(self._beat())
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._all_done.wait(), LIMIT_S)
            if self._refused is not None:
                raise self._refused
            self._conclude()
            show()
        finally:
            await self._let_go()

    # The gate of the transport ----------------------------------------------------------------------------------------

    def connected(self, channel: Channel) -> None:
        """Accept an agent's channel."""
        self._opened.append(channel)
        self._spawn(self._serve(channel))

    def failed(self, node_rank: int, error: MusterError) -> None:
        """Record that a node's agent cannot be started, or ended before it had answered everything."""
        answer = self.answers[node_rank]
        if node_rank in self._missing and answer.error is None:
            answer.error = error
            self._done(node_rank)

    # One node ---------------------------------------------------------------------------------------------------------

    async def _start(self) -> None:
        try:
            await self.transport.start(self)
        except MusterError as error:
            self._refused = error
            self._all_done.set()

    async def _serve(self, channel: Channel) -> None:
        """Ask one node until it has answered all questions."""
        try:
            node = channel.node
            hello = await channel.receive_hello()
            if self.answers[node].hello is not None:
                channel.close()  # a second agent for one node
                return
            self._channels[node] = channel
            self.answers[node].hello = hello
            self._ask(node, channel)
            while node in self._missing:
                self._take(node, await channel.receive())
        except NotAMessage as error:
            channel.abort()
            self.failed(node, UnreachableError(f"{self.answers[node].host}: its agent broke the protocol: {error}"))
        except ChannelClosed:
            return  # the transport reports the reason

    def _ask(self, node: int, channel: Channel) -> None:
        for _ in range(BEATS):
            channel.post(Beat(time.time()))
        program, script = needs(self.context)
        interpreter = self.context.interpreter
        folder = interpreter.folder if interpreter else ""
        python = self.context.warm_python if program else ()
        env = {**self.context.site.env, **self.context.job.env}
        if python and "PYTHONPATH" in env:  # torch may be installed there
            python = ("env", f"PYTHONPATH={env['PYTHONPATH']}", *python)
        channel.post(
            Inspect(program=program[:PATH_MAX], script=script[:PATH_MAX], folder=folder[:PATH_MAX], python=python)
        )
        channel.post(Inspect(run=str(self.context.run.path), nonce=self.nonce, mark=str(node)))
        if node == 0:
            channel.post(prepare_message(self.context, self.answers[0].hello))
        self._ask_for_master(node)

    def _ask_for_master(self, node: int) -> None:
        channel = self._channels.get(node)
        if self.master and channel is not None:
            address, _, port = self.master.rpartition(":")
            with contextlib.suppress(ChannelClosed):
                channel.post(Inspect(peer=address, port=int(port), iface=self.context.iface or ""))

    def _take(self, node: int, message: FromAgent) -> None:
        answer, received = self.answers[node], time.time()
        match message:
            case Heartbeat():
                clock = self._clocks[node]
                clock.note(sent=message.sent, heard=message.heard, answered=message.time, received=received)
                answer.ahead_s = clock.seconds
            case Prepared() if node == 0 and not self.master:
                self._bound(message)
            case Inspected():
                failed = {**answer.facts.get("failed", {}), **message.facts.get("failed", {})}
                answer.facts |= {**message.facts, "failed": failed}
                self._answered[node] += 1
                # the first beats arrived while the agent was still starting
                self._channels[node].post(Beat(time.time()))
            case Broken():
                answer.error = UnreachableError(f"{answer.host}: its agent failed: {message.why}")
                self._done(node)
        self._look(node)

    def _bound(self, message: Prepared) -> None:
        """Ask every connected node to reach the port that node 0 has bound. Other nodes are asked when they connect."""
        answer = self.answers[0]
        try:
            address = self.context.placement.master_addr
            if not self.context.placement.one_host and (self.context.iface or not address):
                greeted = answer.hello.address if answer.hello is not None else ""
                address = own_address(answer.host, greeted, message.addresses, self.context.iface)
        except RefusedError as error:
            answer.no_master = str(error).removeprefix(f"{answer.host}: ")
            for node in list(self._missing):
                self._look(node)
            return
        self.master = f"{address}:{message.port}"
        for node in self._channels:
            self._ask_for_master(node)

    def _look(self, node: int) -> None:
        """Check whether a node has answered all questions that it can be asked."""
        first = self.answers[0]
        lost = not self.master and bool(
            first.error or first.no_master
        )  # node 0's address is unknown, so no node is asked to reach it
        if self._answered[node] >= QUESTIONS - lost and self.answers[node].ahead_s is not None:
            self._done(node)

    def _done(self, node: int) -> None:
        self._missing.discard(node)
        if node == 0 and self.answers[0].error is not None:
            for each in list(self._missing):
                self._look(each)
        if not self._missing:
            self._all_done.set()

    def _conclude(self) -> None:
        """Record which nodes have not answered in time, and whose nonces in the run folder can be read here."""
        for node, answer in enumerate(self.answers):
            if answer.error is None and answer.hello is None:
                answer.error = UnreachableError(
                    f"{answer.host}: no answer within {LIMIT_S:g} s; is it on, and reachable from here? try: ssh "
                    f"{answer.host} true{self.transport.printed(node)}"
                )
            if answer.facts.get("storage", {}).get("where") == "shared":
                # This host has not looked the file up before, so no cache can remember it as missing.
                mark = self.context.run.nonce(str(node))
                try:
                    answer.marked = mark.read_text(encoding="utf-8") == self.nonce
                except OSError:
                    answer.marked = False

    # All nodes --------------------------------------------------------------------------------------------------------

    async def _beat(self) -> None:
        """Send heartbeats, so that the agents' leases do not expire."""
        while True:
            await asyncio.sleep(BEAT_S)
            for channel in self._channels.values():
                with contextlib.suppress(ChannelClosed):
                    channel.post(Beat(time.time()))

    async def _let_go(self) -> None:
        for task in self._tasks:
            task.cancel()
        for channel in self._opened:
            with contextlib.suppress(ChannelClosed):
                channel.post(Bye(0))
            channel.close()
        await self.transport.close([*self._missing, *(n for n, each in enumerate(self.answers) if each.error)])

    def _spawn(self, work: Any) -> None:
        self._tasks.add(asyncio.create_task(work))
