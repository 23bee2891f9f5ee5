"""The agent at work: it starts its node's ranks through a keeper, watches them, and stops them; attempt after attempt.

When the channel closes, or the supervisor has been silent for the lease, it closes the keeper's socket, whereupon the
keeper stops the ranks (TERM, 1 s, KILL); then it ends whatever else it started.
"""

import asyncio
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Final

from jobs import leftovers, linux, network, ports
from jobs.errors import MusterError
from jobs.exits import UNREACHABLE
from jobs.rundir import RunDir
from launch import storage
from launch.channel import Channel, ChannelClosed, Message, over_pipes, over_socket
from launch.node import setup_lines
from launch.node.attempt import NodeAttempt, RankProcessId, gone
from launch.node.keeper_link import KeeperLink

LEASE_LOOK_S: Final = 0.25
BACKLOG: Final = 4096  # ranks dial before the store serves
REACH_S: Final = 5.0


class Agent:
    """One node's end of a run. `lease_s`: how long the supervisor may be silent; 0 where its end closes a pipe."""

    def __init__(self, node: int, channel: Channel, keeper: socket.socket | None, lease_s: float) -> None:
        self.node = node
        self.channel = channel
        self.keeper = KeeperLink(keeper)
        self.lease_s = lease_s
        self.heard = time.monotonic()
        self.alone = False  # the lease has ended
        self.attempt = self._new_attempt(0)
        self.before: set[RankProcessId] = set()  # ranks of attempts before: gone, unless their keeper died
        self.listening: socket.socket | None = None  # the store's, until the keeper has it
        self.starting: asyncio.Task[None] | None = None
        self.set_up: list[str] | None = None  # the setup lines that have been run
        self.tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> int:
        """Serve until the supervisor says bye, falls silent, or the channel closes; return the run's exit code."""
        code = UNREACHABLE
        handlers = {
            "beat": self._beat,
            "inspect": self._inspect,
            "prepare": self._prepare,
            "reach": self._reach,
            "start": self._start,
            "stop": self._stop,
            "hold": self._hold,
            "stop_at": self._stop_at,
            "dump": self._dump,
        }
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._on_term)
        if self.lease_s:
            self._spawn(self._watch_lease())
        try:
            while (message := await self.channel.receive())["do"] != "bye":
                self.heard = time.monotonic()
                await self._guard(handlers[message["do"]](message))
            code = int(message["code"])
            await self.attempt.close()
        except ChannelClosed:
            pass  # the supervisor has gone: the same farewell
        self.attempt.abandon()
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.keeper.close()
        for pid in linux.descendants(os.getpid()):
            linux.kill_quietly(pid, signal.SIGKILL)
        return code

    def _on_term(self) -> None:
        """Pass on that somebody ends this node - a scheduler, mostly - so that the whole run ends in order."""
        asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)  # a second one ends this process
        self._spawn(self._tell({"did": "told"}))

    async def _watch_lease(self) -> None:
        while time.monotonic() - self.heard < self.lease_s:
            await asyncio.sleep(LEASE_LOOK_S)
        print(f"muster agent of node {self.node}: the supervisor was silent for {self.lease_s:g} s", file=sys.stderr)
        self.alone = True
        self.channel.abort()

    async def _beat(self, message: Message) -> None:
        """Answer with both times of this clock, so that the supervisor can tell how far it is off."""
        now = time.time()
        times = {"sent": message["sent"], "heard": now, "time": time.time()}
        await self._tell({"did": "heartbeat", **times, "progress": self.attempt.pulse.record(time.monotonic())})

    # Before the start -----------------------------------------------------------------------------------------------

    async def _inspect(self, message: Message) -> None:
        from launch.check.nodefacts import facts

        self._spawn(self._answer(facts, message))

    async def _answer(self, facts: Any, message: Message) -> None:
        found = await asyncio.to_thread(facts, message)
        await self._tell({"did": "inspected", "facts": found})

    async def _prepare(self, message: Message) -> None:
        """Bind the store's port, and keep it bound: the number is told only once it is ours."""
        await self._turn_to(message)
        self._close_listening()
        self.listening = ports.bind(message["bind"], backlog=BACKLOG)
        port = self.listening.getsockname()[1]
        await self._tell({"did": "prepared", "port": port, "addresses": network.own_addresses()})

    async def _reach(self, message: Message) -> None:
        """Try what the ranks will need: the way to the master, and the run folder."""
        await self._turn_to(message)
        self._spawn(self._try_reach(message, self.attempt))

    async def _try_reach(self, message: Message, attempt: NodeAttempt) -> None:
        from launch.fingerprint import fingerprint

        address, port = message["address"], message["port"]
        route = network.choose(network.own_addresses(), message["iface"]) if message["iface"] else None
        route = route or network.route_to(address)
        why = ""
        try:
            _, writer = await asyncio.wait_for(asyncio.open_connection(address, port), REACH_S)
            writer.close()
        except asyncio.TimeoutError:
            why = f"no answer within {REACH_S:g} s"
        except OSError as error:
            why = os.strerror(error.errno) if error.errno else str(error)  # asyncio's own text repeats the address
        found = storage.find(RunDir(Path(message["run"])), message["nonce"])
        interface, own = route or ("", "")
        said = {"interface": interface, "address": own, "why": why, "code": fingerprint(), **found}
        await attempt.tell({"did": "reached", **said})

    # Attempts -------------------------------------------------------------------------------------------------------

    def _new_attempt(self, number: int) -> NodeAttempt:
        return NodeAttempt(number, self.node, self.channel.send, self._guard)

    async def _turn_to(self, message: Message) -> None:
        """Leave the attempt before behind, if the message is of another one."""
        number = message.get("attempt", self.attempt.number)
        if number != self.attempt.number:
            await self.attempt.close()
            self._close_listening()
            self.before |= set(self.attempt.pids.values())
            self.attempt = self._new_attempt(number)

    def _close_listening(self) -> None:
        if self.listening is not None:
            self.listening.close()
            self.listening = None

    async def _start(self, message: Message) -> None:
        await self._turn_to(message)
        self.starting = self._spawn(self._begin(self.attempt, message))

    async def _begin(self, attempt: NodeAttempt, message: Message) -> None:
        attempt.open(message)
        if message["setup"] and message["setup"] != self.set_up:  # once on a node, however many attempts there are
            log = attempt.folder.setup(attempt.node)
            await setup_lines.run(message["setup"], log, message["workdir"], message["warm"]["env"])
            self.set_up = message["setup"]
        if not self.keeper.is_open:
            await self._ranks_gone()
            await self.keeper.open(**message["warm"])
            self._spawn(self._watch_keeper(self.keeper))
        if self.listening is not None and message["store"]:
            await self.keeper.give_store(self.listening, attempt.number)
        self._close_listening()  # the keeper has it now, or rank 0 may bind it
        await self.keeper.order({"do": "start", "attempt": attempt.number, "ranks": message["ranks"]})
        attempt.follow(self.keeper)

    async def _stop(self, message: Message) -> None:
        if message.get("attempt", self.attempt.number) != self.attempt.number:  # of one that never came here
            await self._tell({"did": "swept", "swept": 0, "left": [], "attempt": message["attempt"]})
            return
        if self.starting is not None and not self.starting.done():
            self.starting.cancel()  # the setup lines may be at work
            await asyncio.gather(self.starting, return_exceptions=True)
        self._close_listening()
        if self.keeper.is_open:
            grace_s, number = message["grace_s"], self.attempt.number
            await self.keeper.order({"do": "stop", "grace_s": grace_s, "attempt": number})
            return
        left = leftovers.described(await self._ranks_gone())
        await self.attempt.close()
        await self._tell({"did": "swept", "swept": 0, "left": left})

    async def _hold(self, message: Message) -> None:
        if self._is_running(message):
            await self.keeper.order({"do": "hold"})
            self.attempt.hold()

    async def _stop_at(self, message: Message) -> None:
        if self._is_running(message):
            await self.keeper.order({"do": "stop_at", "steps": message["steps"]})

    async def _dump(self, message: Message) -> None:
        if self._is_running(message):
            self._spawn(self.attempt.dump(self.keeper))
        else:
            await self._tell({"did": "stacks", "ranks": {}})

    def _is_running(self, message: Message) -> bool:
        """Say whether the attempt that a message is about has ranks here."""
        same = message.get("attempt", self.attempt.number) == self.attempt.number
        return same and self.keeper.is_open and bool(self.attempt.pids)

    async def _watch_keeper(self, keeper: KeeperLink) -> None:
        async for message in keeper.messages():
            if "ready" in message:
                await self._tell({"did": "ready", "ready": message["ready"]})
            elif message.get("attempt", self.attempt.number) == self.attempt.number:
                await self.attempt.on_keeper(message)
        if self.keeper is keeper:
            self.keeper = KeeperLink(None)  # the next attempt starts another
        await self.attempt.close()
        what = "its warm process or keeper has gone"
        await self._tell({"did": "broken", "broken": what, "code": UNREACHABLE, "gone": True})
        await keeper.close()

    async def _ranks_gone(self) -> list[int]:
        """Wait, where there is no keeper any more, for the end of its ranks; return the pids of those that live on."""
        return await gone(self.before | set(self.attempt.pids.values()))

    # Plumbing -------------------------------------------------------------------------------------------------------

    async def _tell(self, message: Message) -> None:
        await self.channel.send({"attempt": self.attempt.number, **message})

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(self._guard(work))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        task.add_done_callback(lambda _: work.close())  # of a task that was cancelled before it began
        return task

    async def _guard(self, work: Coroutine[Any, Any, None]) -> None:
        """Await work; what goes wrong in it is told and ends the node, instead of leaving it half alive."""
        try:
            await work
        except ChannelClosed:
            return  # the main loop sees it too, and ends the node
        except Exception as error:
            if not isinstance(error, MusterError):
                traceback.print_exc()
            what = str(error) or type(error).__name__
            await self._tell({"did": "broken", "broken": what, "code": getattr(error, "exit_code", 1)})


def serve(node: int, carrier: int, keeper: int | None, lease_s: float, alone: str) -> int:
    """Serve a supervisor that has been greeted; `carrier` is a connected socket, or -1 for the standard streams.

    `alone` says what to do with the Slurm job around us when the lease ends: `requeue`, `cancel`, or nothing.
    Returns the run's exit code, or 69 if the supervisor has gone.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the supervisor's to answer
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    linux.adopt_orphans()

    async def work() -> tuple[int, bool]:
        if carrier >= 0:
            channel = await over_socket(socket.socket(fileno=carrier))
        else:
            channel = await over_pipes(os.fdopen(os.dup(0), "rb", 0), os.fdopen(os.dup(1), "wb", 0))
            os.dup2(2, 1)  # what anybody prints must not reach the channel
        own = socket.socket(fileno=keeper) if keeper is not None else None
        agent = Agent(node, channel, own, lease_s)
        return await agent.run(), agent.alone

    code, is_alone = asyncio.run(work())
    if is_alone and alone:
        from slurm.orphan import end_orphan

        print(f"muster agent of node {node}: {end_orphan(os.environ, requeue=alone == 'requeue')}", file=sys.stderr)
    return code
