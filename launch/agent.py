"""The agent: one per node. It starts that node's ranks through a keeper, watches them, and stops them.

It is started as `python -I -m launch.agent`, so that a user's own `jobs/` cannot shadow ours, and told everything
over its channel: nothing of the user's stands on its command line. When the channel closes, it closes the keeper's
socket, whereupon the keeper stops the ranks (TERM, 1 s, KILL).
"""

import argparse
import asyncio
import importlib.util
import os
import platform
import signal
import socket
import subprocess
import time
import traceback
from collections.abc import Coroutine
from itertools import chain
from pathlib import Path
from typing import Any, Final

from jobs import linux
from jobs.errors import MusterError, RefusedError
from jobs.exits import UNREACHABLE
from jobs.rundir import AttemptDir, write_json
from launch import census
from launch.channel import Channel, ChannelClosed, Message, dial, over_pipes
from launch.follow import LineFollower, tail_lines
from launch.keeper_link import KeeperLink
from launch.processes import start_ticks

HEARTBEAT_S: Final = 1.0
FOLLOW_S: Final = 0.1
BACKLOG: Final = 4096  # ranks dial before the store serves
LAST_LINES: Final = 20
LONGEST_LAST: Final = 1000  # characters
BATCH_BYTES: Final = 1 << 18  # of a rank's output in one message


class Agent:
    """One node's end of a run."""

    def __init__(self, node: int, channel: Channel, keeper: socket.socket | None) -> None:
        self.node = node
        self.channel = channel
        self.keeper = KeeperLink(keeper)
        self.listening: socket.socket | None = None
        self.start: Message = {}
        self.unseen: dict[int, int] = {}  # {rank: pid} of programs that have not been seen at the store
        self.followers: dict[int, dict[str, LineFollower]] = {}
        self.tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Serve until the supervisor says bye or the channel closes."""
        handlers = {"prepare": self._prepare, "start": self._start, "stop": self._stop}
        try:
            await self.channel.send(hello(self.node))
            self._spawn(self._beat())
            while (message := await self.channel.receive())["do"] != "bye":
                await self._guard(handlers[message["do"]](message))
        except ChannelClosed:
            pass  # the supervisor has gone: the same farewell
        for task in self.tasks:
            task.cancel()
        await self.keeper.close()

    async def _prepare(self, message: Message) -> None:
        """Bind the store's port, and keep it bound: the number is told only once it is ours."""
        self.listening = socket.create_server((message["bind"], 0), backlog=BACKLOG)
        await self.channel.send({"did": "prepared", "port": self.listening.getsockname()[1]})

    async def _start(self, message: Message) -> None:
        self.start = message
        attempt = AttemptDir(Path(message["attempt_dir"]))
        if message["setup"]:
            await self._set_up(message, attempt)
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

    async def _set_up(self, message: Message, attempt: AttemptDir) -> None:
        """Run the job's setup lines once on this node, in one shell that stops at the first failure."""
        log = attempt.setup(self.node)
        with log.open("wb") as output:
            shell = await asyncio.create_subprocess_exec(
                *("bash", "-e", "-c", "\n".join(message["setup"])),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=message["workdir"],
                env={**os.environ, **message["warm"]["env"]},
            )
            if code := await shell.wait():
                last = (last_lines(log) or ["no output"])[-1]
                raise RefusedError(f"setup: ended with code {code}: {last}; see {log}")

    async def _stop(self, message: Message) -> None:
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

    async def _forward(self) -> None:
        """Send what the console's ranks print to the supervisor, line by line."""
        while True:
            for rank in self.followers:
                await self._forward_rank(rank)
            await asyncio.sleep(FOLLOW_S)

    async def _forward_rank(self, rank: int, *, ended: bool = False) -> None:
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

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            await self.channel.send({"did": "heartbeat", "time": time.time()})
            if self.unseen:
                for rank in census.connected(self.unseen, self.start["master_port"]):
                    del self.unseen[rank]
                    await self.channel.send({"did": "report", "rank": rank, "report": {"report": "arrived"}})

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self.tasks.add(asyncio.create_task(self._guard(work)))

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


def identity() -> dict[str, Any]:
    """Say which process on which host this is."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "pid_start": start_ticks(os.getpid())}


def hello(node: int) -> Message:
    """Say which node this is and what it has; looks for torch without importing it."""
    return {
        "did": "hello",
        "node": node,
        **identity(),
        "python": platform.python_version(),
        "torch": importlib.util.find_spec("torch") is not None,
        "cores": sorted(os.sched_getaffinity(0)),
        "gpus": visible_gpus(),
        "time": time.time(),
    }


def visible_gpus() -> list[str]:
    """List this host's GPUs as CUDA_VISIBLE_DEVICES would: what the user left visible, else all device files."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return [name for name in given.split(",") if name]
    return [str(number) for number, _ in enumerate(Path("/dev").glob("nvidia[0-9]*"))]


async def _serve(args: argparse.Namespace) -> None:
    keeper = socket.socket(fileno=args.keeper_fd) if args.keeper_fd is not None else None
    if args.connect:
        address, _, port = args.connect.rpartition(":")
        token = Path(args.token_file).read_text().strip()
        channel = await dial(address, int(port), token, timeout_s=args.dial_timeout_s)
    else:
        channel = await over_pipes(os.dup(0), os.dup(1))
        os.dup2(2, 1)  # what anybody prints must not reach the channel
    await Agent(args.node, channel, keeper).run()


def main() -> None:
    """Open the channel, then serve."""
    parser = argparse.ArgumentParser(description="internal: started by a transport")
    parser.add_argument("--node", type=int, required=True)
    parser.add_argument("--keeper-fd", type=int, help="inherited socket of a keeper; else this agent starts its own")
    parser.add_argument("--connect", help="ADDRESS:PORT of the supervisor; else standard input and output")
    parser.add_argument("--token-file")
    parser.add_argument("--dial-timeout-s", type=float, default=60.0)
    args = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the supervisor's to answer
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    linux.adopt_orphans()
    asyncio.run(_serve(args))


if __name__ == "__main__":
    main()
