"""Agents that a test starts as transports do, and speaks to as a supervisor does."""

import asyncio
import os
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, TypeVar

from muster.jobs.basics.boot import module_argv
from muster.jobs.basics.errors import MusterError
from muster.jobs.basics.handshake import LONGEST, WELCOME, SupervisorSide, node_key, read_greeting
from muster.jobs.runfolder.rundir import AttemptDir, RunDir
from muster.launch import agent
from muster.launch.wire import messages as wire
from muster.launch.wire.channel import Channel
from muster.launch.wire.codec import decode, encode
from muster.launch.wire.messages import FROM_AGENT, Broken, Hello, Start, StopRanks, Swept
from support.live import wait_until

LOOPBACK = "127.0.0.1"
DEADLINE_S = 20.0
RUN_SECRET = "the secret of this test's run"

Kind = TypeVar("Kind")


class Started:
    """An agent that this test has started, and the two streams of its channel."""

    def __init__(self, *options: str, **variables: str) -> None:
        """Start it with options, and variables of its environment; the run's secret is one of them."""
        ours = ("SSH_CONNECTION", agent.SECRET, agent.KEY)
        environment = {name: value for name, value in os.environ.items() if name not in ours}
        argv = [*module_argv(sys.executable, "muster.launch.agent"), *options]
        self.process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**environment, agent.SECRET: RUN_SECRET, **variables},
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.writer: IO[bytes] = self.process.stdin
        self.reader: IO[bytes] = self.process.stdout
        self.connection: socket.socket | None = None

    def accept(self, server: socket.socket, secret: str = RUN_SECRET) -> int:
        """Take the connection that it dials; let both ends prove themselves, and return its node."""
        server.settimeout(DEADLINE_S)
        self.connection, _ = server.accept()
        self.connection.settimeout(DEADLINE_S)
        stream = self.connection.makefile("rwb", buffering=0)
        self.reader = self.writer = stream  # type: ignore[assignment]
        return prove_supervisor(stream, secret)

    def send(self, message: object) -> None:
        self.writer.write(encode(message))
        self.writer.flush()

    def receive(self) -> Any:
        """Return the next message, as the supervisor would read it."""
        return decode(self.reader.readline(), FROM_AGENT)

    def greeted(self) -> Hello:
        """Return its first message."""
        message = self.receive()
        assert isinstance(message, Hello), message
        return message

    def hang_up(self) -> None:
        """End the channel from this side."""
        self.writer.close()
        if self.connection is not None:
            self.connection.close()

    def end(self) -> tuple[int, str]:
        """Wait for its end; return the code and what it said on standard error."""
        code = self.process.wait(DEADLINE_S)
        return code, self.process.stderr.read().decode()

    def close(self) -> None:
        """Leave nothing behind."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr, self.writer, self.connection):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()


def prove_supervisor(stream: IO[bytes], secret: str) -> int:
    """Be the supervisor's end of a handshake: return the node of the agent, which has proved itself."""
    node, nonce, dialled = read_greeting(stream.readline(LONGEST))
    end = SupervisorSide(node_key(secret, node), (node, nonce, dialled), "run-1", 0)
    stream.write(end.challenge())
    assert end.is_proved(stream.readline(LONGEST))
    stream.write(WELCOME)
    return node


class Gate:
    """What a transport has handed over."""

    def __init__(self) -> None:
        self.channels: asyncio.Queue[Channel] = asyncio.Queue()
        self.failures: list[tuple[int, str]] = []

    def connected(self, channel: Channel) -> None:
        self.channels.put_nowait(channel)

    def failed(self, node_rank: int, error: MusterError) -> None:
        self.failures.append((node_rank, str(error)))

    async def hello(self) -> tuple[Channel, Hello]:
        channel = await self.channels.get()
        return channel, await channel.receive_hello()

    async def until_failed(self, count: int) -> list[tuple[int, str]]:
        """Wait for so many failures; return them all."""
        while len(self.failures) < count:
            await asyncio.sleep(0.02)
        return self.failures


def port_of(listening: socket.socket) -> int:
    port: int = listening.getsockname()[1]
    return port


def closed_port() -> int:
    """A port where nothing listens."""
    with socket.create_server((LOOPBACK, 0)) as listening:
        return port_of(listening)


class Supervised(Started):
    """An agent that is given attempts to run; `folder` is the run's."""

    def __init__(self, folder: Path) -> None:
        super().__init__("--node", "0")
        self.folder = folder
        self.joined: list[wire.Exited] = []  # ends of ranks that came in one message, and were not returned yet
        self.greeted()

    def attempt_dir(self, attempt: int) -> AttemptDir:
        return RunDir(self.folder).attempt(attempt)

    def next(self, kind: type[Kind], rank: int | None = None) -> Kind:
        """Return the next message of a kind, passing over others; a failure of the agent's is never passed over.

        Ends of ranks are returned one by one.
        """
        while True:
            message = self.joined.pop(0) if self.joined else self.receive()
            if isinstance(message, wire.Exits):
                self.joined = list(message.ranks)
                continue
            if isinstance(message, kind) and rank in (None, getattr(message, "rank", None)):
                return message
            assert not isinstance(message, Broken), message

    def order_start(self, attempt: int, *ranks: dict[str, Any], **fields: Any) -> None:
        """Send the start message of an attempt; see `rank`."""
        folder = self.attempt_dir(attempt)
        folder.path.mkdir(exist_ok=True)
        message = {
            "attempt": attempt,
            "node": 0,
            "attempt_dir": str(folder.path),
            "apart": False,
            "workdir": str(self.folder),
            "setup": (),
            "store": False,
            "master_port": 0,
            "warm": {"preload": "", "env": {}, "python": []},
            "console": (),
            "ranks": tuple(self.placed(attempt, rank) for rank in ranks),
        }
        self.send(Start(**{**message, **fields}))

    def start(self, attempt: int, *ranks: dict[str, Any], **fields: Any) -> dict[int, int]:
        """Start an attempt; return the pids of its ranks."""
        self.order_start(attempt, *ranks, **fields)
        started = self.next(wire.Started)
        assert started.attempt == attempt
        return {number: pid for number, pid, _ in started.ranks}

    def placed(self, attempt: int, rank: dict[str, Any]) -> dict[str, Any]:
        """Complete a rank with what a plan would give it."""
        folder = self.attempt_dir(attempt)
        paths = {"out": str(folder.out(rank["rank"])), "err": str(folder.err(rank["rank"]))}
        return {"env": {}, "workdir": str(self.folder), "cores": [], "gpus": [], "threads": 1, **paths, **rank}

    def stop(self, attempt: int) -> Swept:
        """Stop an attempt; return what was swept."""
        self.send(StopRanks(attempt, 0.0))
        return self.next(Swept)

    def wait_for_output(self, attempt: int, rank: int, text: str = "ready\n") -> None:
        path = self.attempt_dir(attempt).out(rank)
        wait_until(lambda: path.is_file() and path.read_text() == text, f"{text!r} from rank {rank}")


def rank(number: int, code: str) -> dict[str, Any]:
    """A rank that runs Python code in a fork of the warm process."""
    return {"rank": number, "call": "builtins:exec", "payload": code}


def program(number: int, *argv: str) -> dict[str, Any]:
    """A rank that runs a program."""
    return {"rank": number, "argv": list(argv)}
