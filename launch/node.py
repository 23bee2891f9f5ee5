"""The agent at work: it starts its node's ranks through a keeper, watches them, and stops them.

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
from itertools import chain
from pathlib import Path
from typing import Any, Final

from jobs import linux, network, ports
from jobs.errors import MusterError
from jobs.exits import UNREACHABLE
from jobs.files import write_json
from jobs.rundir import AttemptDir, RunDir
from launch import census, setup_lines, storage
from launch.agent import identity
from launch.channel import Channel, ChannelClosed, Message, over_pipes, over_socket
from launch.follow import LineFollower, tail_lines
from launch.keeper_link import KeeperLink

LOOK_S: Final = 1.0
FOLLOW_S: Final = 0.1
LEASE_LOOK_S: Final = 0.25
BACKLOG: Final = 4096  # ranks dial before the store serves
LAST_LINES: Final = 20
LONGEST_LAST: Final = 1000  # characters
BATCH_BYTES: Final = 1 << 18  # of a rank's output in one message
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
        self.listening: socket.socket | None = None
        self.start: Message = {}
        self.starting: asyncio.Task[None] | None = None
        self.unseen: dict[int, int] = {}  # {rank: pid} of programs that have not been seen at the store
        self.followers: dict[int, dict[str, LineFollower]] = {}
        self.courier: storage.Courier | None = None
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
        }
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._on_term)
        if self.lease_s:
            self._spawn(self._watch_lease())
        try:
            while (message := await self.channel.receive())["do"] != "bye":
                self.heard = time.monotonic()
                await self._guard(handlers[message["do"]](message))
            code = int(message["code"])
            await self._deliver()
        except ChannelClosed:
            pass  # the supervisor has gone: the same farewell
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
        self._spawn(self.channel.send({"did": "told"}))

    async def _watch_lease(self) -> None:
        while time.monotonic() - self.heard < self.lease_s:
            await asyncio.sleep(LEASE_LOOK_S)
        print(f"muster agent of node {self.node}: the supervisor was silent for {self.lease_s:g} s", file=sys.stderr)
        self.alone = True
        self.channel.abort()

    async def _beat(self, message: Message) -> None:
        """Answer with both times of this clock, so that the supervisor can tell how far it is off."""
        now = time.time()
        await self.channel.send({"did": "heartbeat", "sent": message["sent"], "heard": now, "time": time.time()})

    # Before the start -----------------------------------------------------------------------------------------------

    async def _inspect(self, message: Message) -> None:
        from launch.nodefacts import facts

        self._spawn(self._answer(facts, message))

    async def _answer(self, facts: Any, message: Message) -> None:
        found = await asyncio.to_thread(facts, message)
        await self.channel.send({"did": "inspected", "facts": found})

    async def _prepare(self, message: Message) -> None:
        """Bind the store's port, and keep it bound: the number is told only once it is ours."""
        self.listening = ports.bind(message["bind"], backlog=BACKLOG)
        port = self.listening.getsockname()[1]
        await self.channel.send({"did": "prepared", "port": port, "addresses": network.own_addresses()})

    async def _reach(self, message: Message) -> None:
        """Try what the ranks will need: the way to the master, and the run folder."""
        self._spawn(self._try_reach(message))

    async def _try_reach(self, message: Message) -> None:
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
        await self.channel.send({"did": "reached", **said})

    # Ranks ----------------------------------------------------------------------------------------------------------

    async def _start(self, message: Message) -> None:
        self.start = message
        self.starting = self._spawn(self._begin(message))

    async def _begin(self, message: Message) -> None:
        attempt = AttemptDir(Path(message["attempt_dir"]))
        if message["apart"]:
            attempt.path.mkdir(parents=True, exist_ok=True)
            self.courier = storage.Courier(
                RunDir(attempt.path.parent), attempt, self.node, [start["rank"] for start in message["ranks"]]
            )
        if message["setup"]:
            await setup_lines.run(
                message["setup"], attempt.setup(self.node), message["workdir"], message["warm"]["env"]
            )
        if not self.keeper.is_open:
            await self.keeper.open(**message["warm"])
            self._spawn(self._watch_keeper())
        if self.listening is not None:
            if message["store"]:
                self.keeper.give_store(self.listening)
            self.listening.close()  # the keeper has it now, or rank 0 may bind it
            self.listening = None
        await self.keeper.order({"do": "start", "ranks": message["ranks"]})
        self.followers = {
            rank: {"out": LineFollower(attempt.out(rank)), "err": LineFollower(attempt.err(rank))}
            for rank in message["console"]
        }
        self._spawn(self._forward())
        self._spawn(self._look())

    async def _stop(self, message: Message) -> None:
        if self.starting is not None and not self.keeper.is_open:
            self.starting.cancel()  # the setup lines are still at work
            await asyncio.gather(self.starting, return_exceptions=True)
        if not self.keeper.is_open:
            await self.channel.send({"did": "swept", "swept": 0})
            return
        await self.keeper.order({"do": "stop", "grace_s": message["grace_s"]})

    async def _watch_keeper(self) -> None:
        async for message in self.keeper.messages():
            if "started" in message:
                self._note_started(message)
                await self.channel.send({"did": "started", "ranks": message["started"], "time": message["time"]})
            elif "exited" in message:
                rank = message.pop("exited")
                self.unseen.pop(rank, None)
                await self._forward_rank(rank, ended=True)
                lines = self._last_lines(rank)
                await self.channel.send({"did": "exited", "rank": rank, "last_lines": lines, **message})
            else:
                did = next(key for key in ("ready", "report", "swept", "broken") if key in message)
                if did == "swept":
                    await self._deliver()
                await self.channel.send({"did": did, **message})
        what = "its warm process or keeper has gone"
        await self.channel.send({"did": "broken", "broken": what, "code": UNREACHABLE, "gone": True})

    def _note_started(self, message: Message) -> None:
        pids = dict(message["started"])
        if "argv" in self.start["ranks"][0]:  # a program of the user's: it tells us nothing, so we look
            self.unseen = dict(pids)
        ranks = [
            {"rank": start["rank"], "pid": pids[start["rank"]], "cores": start["cores"], "gpus": start["gpus"]}
            for start in self.start["ranks"]
        ]
        record = {**identity(), "node": self.node, "ranks": ranks}
        write_json(AttemptDir(Path(self.start["attempt_dir"])).node(self.node), record)

    def _last_lines(self, rank: int) -> list[str]:
        attempt = AttemptDir(Path(self.start["attempt_dir"]))
        return last_lines(attempt.err(rank)) or last_lines(attempt.out(rank))

    # What ranks write -----------------------------------------------------------------------------------------------

    async def _forward(self) -> None:
        """Send what the console's ranks print to the supervisor, line by line, and files that it cannot see."""
        while True:
            for rank in self.followers:
                await self._forward_rank(rank)
            await self._deliver()
            await asyncio.sleep(FOLLOW_S)

    async def _deliver(self) -> None:
        """Send what is new in this node's part of the run folder, where the supervisor cannot see it."""
        if self.courier is not None:
            for message in self.courier.news():
                await self.channel.send(message)

    async def _forward_rank(self, rank: int, *, ended: bool = False) -> None:
        if ended:
            await self._deliver()
        for stream, follower in self.followers.get(rank, {}).items():
            batch: list[str] = []
            room = BATCH_BYTES
            for line in chain(follower.poll(), follower.flush() if ended else ()):
                batch.append(line.decode(errors="replace"))
                room -= len(line) + 1
                if room < 0:
                    await self.channel.send({"did": "log", "rank": rank, "stream": stream, "lines": batch})
                    batch, room = [], BATCH_BYTES
            if batch:
                await self.channel.send({"did": "log", "rank": rank, "stream": stream, "lines": batch})

    async def _look(self) -> None:
        """Look which programs of the user's have come to the store."""
        while True:
            for rank in census.connected(self.unseen, self.start["master_port"]) if self.unseen else ():
                self.unseen.pop(rank, None)
                await self.channel.send({"did": "report", "rank": rank, "report": {"report": "arrived"}})
            await asyncio.sleep(LOOK_S)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(self._guard(work))
        self.tasks.add(task)
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
            await self.channel.send({"did": "broken", "broken": what, "code": getattr(error, "exit_code", 1)})


def last_lines(path: Path) -> list[str]:
    """Return the last lines of a log, long ones cut: a verdict is one row of a log."""
    lines = tail_lines(path, LAST_LINES)
    return [line if len(line) <= LONGEST_LAST else f"{line[:LONGEST_LAST]}… ({len(line)} characters)" for line in lines]


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
