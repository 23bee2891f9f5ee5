"""One queue for everything that happens to a run: what agents say, what becomes of their starts, signals, the clock."""

import asyncio
import signal
import time
from collections.abc import Coroutine
from typing import Any, Final

from jobs import exits
from jobs.errors import MusterError
from launch.channel import Channel, ChannelClosed, Message

TICK_S: Final = 0.25
SIGNALS: Final[tuple[tuple[signal.Signals, Message], ...]] = (
    (signal.SIGINT, {"by": "Ctrl-C"}),
    (signal.SIGTERM, {"by": "SIGTERM"}),
    (signal.SIGHUP, {"by": "SIGHUP"}),
    # What a batch system sends some time before the limit (slurm.signal_s).
    (signal.SIGUSR2, {"by": "SIGUSR2", "code": exits.TIMEOUT, "text": "the time limit is near (SIGUSR2)"}),
)
NOBODY: Final = -1  # the node of a message that comes from no node


class Inbox:
    """(node rank, message) in order of arrival. It is the gate of a transport (transports/base.py)."""

    def __init__(self) -> None:
        self.channels: list[Channel] = []
        self._queue: asyncio.Queue[tuple[int, Message]] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()

    async def next(self) -> tuple[int, Message]:
        """Return the oldest message."""
        return await self._queue.get()

    def put(self, node_rank: int, message: Message) -> None:
        """Add a message."""
        self._queue.put_nowait((node_rank, message))

    def connected(self, channel: Channel) -> None:
        """Take an agent's channel, and read it to its end."""
        self.channels.append(channel)
        self.spawn(self._read(channel))

    def failed(self, node_rank: int, error: MusterError) -> None:
        """Learn that a node's agent cannot be started, or has ended."""
        self.put(node_rank, {"did": "failed", "error": error})

    def tick(self) -> None:
        """Have a tick come every TICK_S from now on."""
        self.spawn(self._tick())

    def listen_for_signals(self) -> None:
        """Have the signals that ask for an end come as messages."""
        loop = asyncio.get_running_loop()
        for number, message in SIGNALS:
            loop.add_signal_handler(number, self.put, NOBODY, {"did": "stop", **message})

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something beside the queue, until `close`."""
        self._tasks.add(asyncio.create_task(work))

    def close(self) -> None:
        """Read and tick no more."""
        for task in self._tasks:
            task.cancel()

    async def _read(self, channel: Channel) -> None:
        node_rank = channel.node
        try:
            hello = await channel.receive()
            node_rank = hello["node"]
            self.put(node_rank, {**hello, "channel": channel})
            while True:
                message = await channel.receive()
                self.put(node_rank, {**message, "received": time.time(), "via": channel})
        except ChannelClosed:
            if node_rank >= 0:
                self.put(node_rank, {"did": "gone", "why": "its agent has gone", "via": channel})

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.put(NOBODY, {"did": "tick"})
