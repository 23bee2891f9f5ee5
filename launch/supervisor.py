"""The supervisor: starts the agents, watches the ranks, judges, and leaves nothing behind. One attempt, for now.

    agents answer → node 0 binds the store's port → every node starts its ranks → they arrive, meet, work, end
         │                                                        │
         └── a failure, the user, a deadline or a lost node ──────┴──→ stop all: TERM, grace, KILL, sweep → verdict

Everything that happens comes through one inbox, in order; every wait has a deadline.
"""

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Final, Protocol

from jobs import errors, exits
from jobs.rundir import write_json
from launch import processes
from launch.channel import Channel, ChannelClosed, Message
from launch.console import Console
from launch.eventlog import EventLog
from launch.plan import Context, Machine, plan_nodes, start_message
from launch.roster import Roster
from launch.verdict import Ending, Stop, Verdict, cause_of, judge

SWEEP_S: Final = 3.0  # beyond the grace, for the last KILL to be reported
MEET_S: Final = 5.0  # beyond the start time-out, for the ranks' own time-out to speak first
SILENT_S: Final = 5.0
LOOPBACK: Final = "127.0.0.1"
TICK_S: Final = 0.25


class Transport(Protocol):
    """How agents are started on nodes, and over which carrier they talk."""

    name: str

    async def start(self) -> list[Channel]:
        """Start one agent per node; return their channels in any order."""
        ...

    async def close(self) -> None:
        """Wait for the agents to end."""
        ...


class Supervisor:
    """One run, from its first agent to its verdict."""

    def __init__(self, context: Context, transport: Transport, console: Console) -> None:
        self.context = context
        self.transport = transport
        self.console = console
        self.run_dir = context.run
        self.log = EventLog(context.run)
        self.inbox: asyncio.Queue[tuple[int, Message]] = asyncio.Queue()
        self.roster = Roster(context.placement, meets=context.entry is not None)
        self.nodes = self.roster.nodes
        self.endings: list[Ending] = []
        self.channels: list[Channel] = []
        self.stop: Stop | None = None
        self.stop_deadline: float | None = None
        self.deadline = time.monotonic() + context.job.start_timeout_s
        self.started_at = time.monotonic()
        self.ticked = time.monotonic()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> Verdict:
        """Run the attempt and record it; whatever happens, no process of the run is left."""
        began = time.time()
        self.log.submitted(self.context, self.transport.name)
        self._listen_for_signals()
        try:
            await self._attempt()
        finally:
            await self._farewell()
        verdict = judge(self.endings, self.stop)
        advice = self.log.ended(self.context.attempt, verdict, began)
        self.console.end(verdict, time.time() - began, self.run_dir.run_id, advice)
        return verdict

    async def _attempt(self) -> None:
        self._spawn(self._tick())
        self.channels = await self.transport.start()
        for channel in self.channels:
            self._spawn(self._read(channel))
        while not self._finished():
            node_rank, message = await self.inbox.get()
            await self._handle(node_rank, message)

    def _finished(self) -> bool:
        if self.stop_deadline is None:
            return not self.roster.running
        if time.monotonic() > self.stop_deadline:
            return True
        return all(node.swept or node.gone or node.channel is None for node in self.nodes)

    # Messages -------------------------------------------------------------------------------------------------------

    async def _handle(self, node_rank: int, message: Message) -> None:
        handlers: dict[str, Callable[[int, Message], Any]] = {
            "hello": self._on_hello,
            "prepared": self._on_prepared,
            "started": self._on_started,
            "report": self._on_report,
            "exited": self._on_exited,
            "swept": self._on_swept,
            "log": self._on_log,
            "broken": self._on_broken,
            "gone": self._on_gone,
            "stop": self._on_stop,
            "tick": self._on_tick,
        }
        if node_rank >= 0:
            self.nodes[node_rank].heard = time.monotonic()
        if handler := handlers.get(message["did"]):  # a heartbeat needs no more than to be heard
            await handler(node_rank, message)

    async def _on_hello(self, node_rank: int, message: Message) -> None:
        self.nodes[node_rank].hello = message
        self.nodes[node_rank].channel = message["channel"]
        if self.stop_deadline is not None:
            await self._send(node_rank, {"do": "stop", "grace_s": 0.0})
        elif all(node.hello for node in self.nodes):
            # Ranks of one machine meet on loopback: nobody outside need see the store.
            await self._send(0, {"do": "prepare", "bind": LOOPBACK if self.context.one_host else ""})

    async def _on_prepared(self, node_rank: int, message: Message) -> None:
        if self.stop_deadline is not None:
            return
        port = message["port"]
        placement, attempt = self.context.placement, self.run_dir.attempt(self.context.attempt)
        machines = [
            Machine(node.hello["host"], tuple(node.hello["cores"]), tuple(node.hello["gpus"]), node.hello["torch"])
            for node in self.nodes
        ]
        plans = plan_nodes(self.context, machines, os.environ, port)
        attempt.make()
        write_json(attempt.placement, placement.to_json())
        master = {"master_addr": placement.master_addr, "master_port": port}
        self.log.event("attempt", attempt=self.context.attempt, world_size=placement.world_size, **master)
        self.console.plan(str(self.run_dir.path), plans, f"{placement.master_addr}:{port}")
        self.deadline = time.monotonic() + self.context.job.start_timeout_s
        self.started_at = time.monotonic()
        for node, plan in enumerate(plans):
            start = start_message(self.context, plan, store=machines[0].torch, master_port=port)
            write_json(attempt.command(node), start)
            await self._send(node, start)

    async def _on_started(self, node_rank: int, message: Message) -> None:
        host = self.nodes[node_rank].hello["host"]
        self.log.event("started", attempt=self.context.attempt, node=node_rank, host=host, ranks=message["ranks"])

    async def _on_report(self, node_rank: int, message: Message) -> None:
        report, rank = message["report"], message["rank"]
        if report["report"] == "arrived":
            self.roster.arrived.add(rank)
        elif report["report"] == "joined":
            self.roster.joined.add(rank)
            if len(self.roster.joined) == len(self.roster.node_of):
                seconds = round(time.monotonic() - self.started_at, 3)
                self.log.event("joined", attempt=self.context.attempt, seconds=seconds)
                ranks = len(self.roster.joined)
                self.console.say(f"{ranks} rank{'s' * (ranks != 1)} joined after {seconds:.1f} s")
        elif report["report"] == "progress":
            self.console.progress(report)

    async def _on_exited(self, node_rank: int, message: Message) -> None:
        failure = message["failure"]
        text = ""
        if failure:  # an error of ours speaks for itself; of others the type is half of what they say
            text = (
                failure["message"] if hasattr(errors, failure["kind"]) else f"{failure['kind']}: {failure['message']}"
            )
        ending = Ending(
            rank=message["rank"],
            node=node_rank,
            host=self.nodes[node_rank].hello["host"],
            code=message["code"],
            signal=message["signal"],
            ended=message["ended"],
            cause=cause_of(message["code"], message["signal"], message["sent"], failure),
            message=text,
            last_lines=message["last_lines"],
            ours=self.context.entry is not None,
        )
        self.roster.running.discard(message["rank"])
        await self._record(ending)

    async def _record(self, ending: Ending) -> None:
        self.endings.append(ending)
        self.log.event("exited", attempt=self.context.attempt, **asdict(ending))
        if ending.cause in ("own", "peer"):
            await self._stop_all(None, f"{ending.where()} has failed", self.context.job.grace_s)

    async def _on_swept(self, node_rank: int, message: Message) -> None:
        self.nodes[node_rank].swept = True

    async def _on_log(self, node_rank: int, message: Message) -> None:
        self.console.lines(message["stream"], message["lines"])

    async def _on_broken(self, node_rank: int, message: Message) -> None:
        self.nodes[node_rank].swept |= message.get("gone", False)
        await self._lose(node_rank, message["broken"], message.get("code", exits.REFUSED))

    async def _on_gone(self, node_rank: int, message: Message) -> None:
        if not self.nodes[node_rank].gone:
            self.nodes[node_rank].gone = True
            await self._lose(node_rank, message["why"], exits.UNREACHABLE)

    async def _lose(self, node_rank: int, why: str, code: int) -> None:
        """Count a node's remaining ranks as ended with it."""
        lost = {rank for rank in self.roster.running if self.roster.node_of[rank] == node_rank}
        if not lost:
            return
        self.roster.running -= lost
        host = self.context.placement.nodes[node_rank].host
        cause = "own" if self.stop_deadline is None else "stopped"
        await self._record(Ending(None, node_rank, host, code, None, time.time(), cause, why))  # type: ignore[arg-type]

    async def _on_stop(self, node_rank: int, message: Message) -> None:
        grace_s = 0.0 if self.stop_deadline is not None or message.get("now") else message.get("grace_s")
        grace_s = self.context.job.grace_s if grace_s is None else grace_s
        await self._stop_all(Stop(exits.STOPPED, f"stopped by {message['by']}"), message["by"], grace_s)

    # Deadlines and stopping -----------------------------------------------------------------------------------------

    async def _on_tick(self, node_rank: int, message: Message) -> None:
        now = time.monotonic()
        if self.stop_deadline is None and self.run_dir.stop.exists():
            request = json.loads(self.run_dir.stop.read_text())
            await self._on_stop(-1, {**request, "by": "muster stop"})
        if self.stop_deadline is not None:
            return
        frozen = now - self.ticked > SILENT_S / 2  # we ourselves were (Ctrl-Z, a sleeping laptop): nobody else is late
        self.ticked = now
        for rank, node in enumerate(self.nodes):
            if frozen:
                node.heard = now
            if node.hello and not node.gone and now - node.heard > SILENT_S:
                node.gone = True
                await self._lose(rank, f"its agent was silent for {SILENT_S:g} s", exits.UNREACHABLE)
        late_s = now - self.deadline
        if late_s > 0 and (late := self.roster.late(self.context.job.start_timeout_s, patient=late_s < MEET_S)):
            await self._stop_all(Stop(exits.TIMEOUT, late), late, self.context.job.grace_s)

    async def _stop_all(self, stop: Stop | None, reason: str, grace_s: float) -> None:
        """Tell every node to stop its ranks; a second call only shortens the grace."""
        if self.stop_deadline is None:
            self.stop = stop
            self.log.event("stopping", attempt=self.context.attempt, reason=reason)
            if stop is not None or len(self.roster.running) > 0:
                self.console.say(f"stopping the ranks: {reason}")
        elif grace_s > 0:
            return
        self.stop_deadline = time.monotonic() + grace_s + SWEEP_S
        for rank, node in enumerate(self.nodes):
            if node.channel is not None and not node.gone:
                await self._send(rank, {"do": "stop", "grace_s": grace_s})

    # Plumbing -------------------------------------------------------------------------------------------------------

    async def _send(self, node_rank: int, message: Message) -> None:
        channel = self.nodes[node_rank].channel
        assert channel is not None
        try:
            await channel.send(message)
        except ChannelClosed:
            self.inbox.put_nowait((node_rank, {"did": "gone", "why": "its agent has gone"}))

    async def _read(self, channel: Channel) -> None:
        node_rank = channel.node
        try:
            hello = await channel.receive()
            node_rank = hello["node"]
            self.inbox.put_nowait((node_rank, {**hello, "channel": channel}))
            while True:
                self.inbox.put_nowait((node_rank, await channel.receive()))
        except ChannelClosed:
            if node_rank >= 0:
                self.inbox.put_nowait((node_rank, {"did": "gone", "why": "its agent has gone"}))

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.inbox.put_nowait((-1, {"did": "tick"}))

    def _listen_for_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number, by in ((signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM"), (signal.SIGHUP, "SIGHUP")):
            loop.add_signal_handler(number, self.inbox.put_nowait, (-1, {"did": "stop", "by": by}))

    async def _farewell(self) -> None:
        """Let every agent go; then whatever still carries the run id is killed."""
        for task in self._tasks:
            task.cancel()
        for channel in self.channels:
            try:
                await channel.send({"do": "bye"})
            except ChannelClosed:
                continue  # gone already: that is what bye asks for
            finally:
                channel.close()
        await self.transport.close()
        if left := processes.of_run(self.run_dir.run_id):
            self.log.event("warning", text=f"{len(left)} processes outlived their keeper and were killed")
            processes.kill_run(self.run_dir.run_id, term_s=0.0)

    def _spawn(self, work: Any) -> None:
        self._tasks.add(asyncio.create_task(work))
