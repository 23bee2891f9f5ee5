"""One queue for all events of a run: messages of agents, failed starts, signals, ticks of the clock."""

import asyncio
import signal
import time
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Protocol

from muster.jobs.basics import exits
from muster.jobs.basics.errors import MusterError, UnreachableError
from muster.jobs.basics.reading import UntrustedError
from muster.jobs.runfolder.rundir import RunDir
from muster.launch.records.runrows import number, read_json, real
from muster.launch.records.verdict import RankEnd, Stop
from muster.launch.supervision.run_nodes import TICK_S
from muster.launch.wire.channel import Channel, ChannelClosed, NotAMessage
from muster.launch.wire.messages import Bye, FromAgent
from muster.slurm.notice import TIME_LIMIT, Notice


class SchedulerJob(Protocol):
    """The scheduler's job in which a supervisor runs (`launch/scheduler/requeue.py`)."""

    def cause(self, first: RankEnd | None) -> Stop | None:
        """Return why the scheduler ended the attempt, according to its messages; None if it did not."""

    def notice(self, *, limit: bool) -> Notice | None:
        """Return why and when the scheduler is about to end the job; None if it is not."""


@dataclass(frozen=True)
class Heard:
    """A message of a node, and when it arrived (Unix seconds)."""

    slot: int
    message: FromAgent
    via: Channel
    received: float


@dataclass(frozen=True)
class NodeChannelClosed:
    """A node's channel has closed. `via`: the channel, or None if a failed send revealed it."""

    slot: int
    why: str = "lost the connection to its agent"
    via: Channel | None = None


@dataclass(frozen=True)
class Failed:
    """A node's agent cannot be started, or has ended."""

    slot: int
    error: MusterError


@dataclass(frozen=True)
class Refused:
    """No agent can be started at all."""

    error: MusterError


@dataclass(frozen=True)
class StopRequest:
    """A request to end the run. `grace_s`: None means the job's own grace period."""

    by: str
    text: str = ""
    code: int = exits.STOPPED
    now: bool = False
    grace_s: float | None = None
    why: str = ""

    @classmethod
    def of(cls, record: dict[str, Any]) -> "StopRequest":
        """Return the request in stop.json."""
        code, grace_s = number(record.get("code")), real(record.get("grace_s"))
        return cls(
            by=str(record.get("who") or "muster stop"),
            text=str(record.get("text") or ""),
            code=exits.STOPPED if code is None else code & 0xFF,
            now=record.get("now") is True,
            grace_s=None if grace_s is None else max(0.0, grace_s),
        )


@dataclass(frozen=True)
class Tick:
    """TICK_S have passed since the last tick."""


@dataclass(frozen=True)
class CheckpointChosen:
    """The checkpoint of the next attempt has been chosen."""


@dataclass(frozen=True)
class TaskFailed:
    """A coroutine in the background has failed, which ends the run."""

    error: BaseException


@dataclass(frozen=True)
class Noticed:
    """The scheduler has answered whether it is about to end the job."""

    answer: asyncio.Future[Notice | None]


Event = Heard | NodeChannelClosed | Failed | Refused | StopRequest | Tick | CheckpointChosen | Noticed | TaskFailed

ENDED_BY: Final = (signal.SIGUSR1, signal.SIGUSR2)  # signals that end a process without a handler
SIGNALS: Final[tuple[tuple[signal.Signals, StopRequest], ...]] = (
    (signal.SIGINT, StopRequest("Ctrl-C")),
    (signal.SIGTERM, StopRequest("SIGTERM")),
    (signal.SIGHUP, StopRequest("SIGHUP")),
    # Slurm sends this signal slurm.signal_s before the time limit.
    (signal.SIGUSR2, StopRequest("SIGUSR2", "the time limit is near (SIGUSR2)", exits.TIMEOUT, why=TIME_LIMIT)),
)


class Inbox:
    """The queue of events, in order of arrival. It implements the Gate of a transport (transports/base.py)."""

    def __init__(self) -> None:
        self.channels: list[Channel] = []
        self._queue: asyncio.Queue[Event] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()

    async def next(self) -> Event:
        """Return the oldest event."""
        event = await self._queue.get()
        if isinstance(event, Heard):
            event.via.unhandled.release()
        return event

    def put(self, event: Event) -> None:
        """Add an event."""
        self._queue.put_nowait(event)

    def connected(self, channel: Channel) -> None:
        """Take over an agent's channel, and read messages from it until it closes."""
        self.channels.append(channel)
        self.spawn(self._read(channel))

    def failed(self, node_rank: int, error: MusterError) -> None:
        """Add an event: a node's agent cannot be started, or has ended."""
        self.put(Failed(node_rank, error))

    def tick(self) -> None:
        """Start adding a Tick every TICK_S."""
        self.spawn(self._tick())

    def listen_for_signals(self, run: RunDir) -> None:
        """Turn signals that request an end into events, and SIGUSR1 into a request for a checkpoint.

        If nohup has disabled SIGHUP, it stays ignored.
        """
        loop = asyncio.get_running_loop()
        for signal_number, request in SIGNALS:
            if signal_number != signal.SIGHUP or signal.getsignal(signal_number) is not signal.SIG_IGN:
                loop.add_signal_handler(signal_number, self.put, request)
        loop.add_signal_handler(signal.SIGUSR1, run.ask_to_save, "SIGUSR1")
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDED_BY)  # an earlier run in this process blocked these signals

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine in the background until `close`. Its error becomes an event."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.put(TaskFailed(error))

    def close(self, code: int) -> None:
        """Stop reading and ticking, and send every agent Bye with `code`, the run's exit code."""
        signal.pthread_sigmask(
            signal.SIG_BLOCK, ENDED_BY
        )  # from now on these signals are ignored, so that they cannot end this process
        for task in self._tasks:
            task.cancel()
        for channel in self.channels:
            with suppress(ChannelClosed):  # the channel is closed already
                channel.post(Bye(code))
            channel.close()

    async def _read(self, channel: Channel) -> None:
        """Add a node's messages to the queue; close its channel at the first invalid one."""
        node = channel.node
        try:
            hello = await channel.receive_hello()
        except ChannelClosed as error:
            channel.abort()
            why = f"its agent closed the connection before its greeting: {error}"
            self.failed(node, UnreachableError(f"node {node}: {why}"))
            return
        message: FromAgent = hello
        try:
            while True:
                await channel.unhandled.acquire()  # only a node that sends too much has to wait
                self.put(Heard(node, message, channel, time.time()))
                message = await channel.receive()
        except NotAMessage as error:
            channel.abort()
            self.put(NodeChannelClosed(node, f"its agent broke the protocol: {error}", channel))
        except ChannelClosed:
            self.put(NodeChannelClosed(node, via=channel))

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.put(Tick())


def requested(run: RunDir) -> dict[str, Any]:
    """Return the content of stop.json, {} if it does not exist. A file that belongs to another user is ignored."""
    try:
        return read_json(run.stop)
    except UntrustedError:
        return {}
