"""One attempt on one node: the output of its ranks, their progress, and how each of them ended.

The agent (`serve.py`) and the rank parent outlive it. Every message carries the attempt's number, so that late ones are
recognised.
"""

import asyncio
import contextlib
import sys
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, Final, Literal

from muster.jobs.basics.errors import MusterError
from muster.jobs.basics.files import write_json
from muster.jobs.machine import procfs
from muster.jobs.node import logcap
from muster.jobs.runfolder.rundir import AttemptDir, RunDir
from muster.launch.common import processes, storage
from muster.launch.common.follow import LineFollower, tail_lines
from muster.launch.common.host import identity
from muster.launch.node import census
from muster.launch.node.dumping import Dumps, size_of
from muster.launch.node.gpus import GpuWatch
from muster.launch.node.keeper_link import KeeperLink
from muster.launch.node.pulse import Pulse
from muster.launch.wire import messages as wire
from muster.launch.wire.codec import fits
from muster.launch.wire.records import Failure, Progress, RankReport, Stack

LOOK_S: Final = 1.0
HOLD_LOOK_S: Final = 0.02
FOLLOW_S: Final = 0.1
LAST_LINES: Final = 20
LONGEST_LAST: Final = 1000  # characters
BATCH_BYTES: Final = 1 << 18  # of a rank's output in one message
GONE_S: Final = 2.0  # for the ranks to end after their parent has died
GONE_LOOK_S: Final = 0.02
ASK_S: Final = 1.0  # for the rank parent to ask the ranks for their stacks

RankProcessId = tuple[int, int | None]  # pid, and start time in clock ticks after boot; None: it had already ended
Tell = Callable[[wire.FromAgent], Awaitable[None]]
Guard = Callable[[Coroutine[Any, Any, None]], Coroutine[Any, Any, None]]


class NodeAttempt:
    """An attempt's ranks on this node. `slot`: the node's number until the start message gives another one."""

    def __init__(self, number: int, slot: int, tell: Tell, guard: Guard) -> None:
        self.number = number
        self.node = slot
        self.start: wire.Start | None = None
        self.pids: dict[int, RankProcessId] = {}
        self.tell = tell  # send a message to the supervisor
        self._guard = guard
        self._unseen: dict[int, int] = {}  # {rank: pid} of users' programs that have not connected to the store yet
        self._followers: dict[int, dict[Literal["out", "err"], LineFollower]] = {}
        self._courier: storage.Courier | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._sending = asyncio.Lock()  # only one task at a time may read a file
        self.pulse = Pulse()
        self._gpus = GpuWatch({})
        self._looked = asyncio.Event()
        self._hurry = asyncio.Event()  # set while ranks are asked to hold and none has been seen waiting
        self._dumped: asyncio.Future[dict[str, str]] | None = None

    @property
    def ours(self) -> bool:
        """True when the ranks run our functions and not a user's program."""
        return any("argv" not in start for start in self._ranks)

    @property
    def _ranks(self) -> tuple[dict[str, Any], ...]:
        return self.start.ranks if self.start is not None else ()

    @property
    def folder(self) -> AttemptDir:
        """The attempt's part of the run folder, as this node sees it."""
        assert self.start is not None
        return AttemptDir(Path(self.start.attempt_dir))

    # Its beginning and its end --------------------------------------------------------------------------------------

    def open(self, message: wire.Start) -> None:
        """Record the start message, and make the folders that it needs."""
        self.start = message
        self.node = message.node
        self._followers = {
            rank: {"out": LineFollower(self.folder.out(rank)), "err": LineFollower(self.folder.err(rank))}
            for rank in message.console
        }
        if message.apart:
            self.folder.path.mkdir(parents=True, exist_ok=True)
            RunDir(self.folder.path.parent).trim_attempts(self.number)
            if not self.ours:
                RunDir(self.folder.path.parent).make_files()
            ranks = [start["rank"] for start in message.ranks]
            self._courier = storage.Courier(RunDir(self.folder.path.parent), self.folder, self.node, ranks)

    def follow(self, keeper: KeeperLink) -> None:
        """Start to watch the ranks. They have been ordered to start."""
        for work in (self._forward(), self._cap(), self._look(keeper), *(() if self.ours else (self._take_census(),))):
            self._watch(work)
        # Rank i of the node uses its i-th GPU.
        if names := {
            each["rank"]: each["gpus"][place] for place, each in enumerate(self._ranks) if each["gpus"][place:]
        }:
            self._gpus = GpuWatch(names)

    def _watch(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(self._guard(work))
        self._tasks.add(task)
        task.add_done_callback(lambda _: work.close())  # in case the task was cancelled before it began

    def tell_programs(self, message: wire.StopRanks) -> None:
        """Write down for users' programs why they are stopped, and by when (Unix seconds) they should end."""
        if self.start is None or self.ours or not message.reason:
            return
        told = {"reason": message.reason, "message": message.text, "deadline": time.time() + message.grace_s}
        with self._saying():  # they are stopped even if this fails
            write_json(self.folder.stop(self.node), told)

    def ask_to_save(self) -> None:
        """Handle SIGUSR1: ask rank 0 for a checkpoint through the run folder, which all runs that save share."""
        if self.start is not None:
            with self._saying():
                RunDir(self.folder.path.parent).ask_to_save(f"SIGUSR1 at node {self.node}")

    @contextlib.contextmanager
    def _saying(self) -> Iterator[None]:
        """Report on standard error if something cannot be written, and continue."""
        try:
            yield
        except MusterError as error:
            print(f"muster agent of node {self.node}: {error}", file=sys.stderr)

    async def close(self) -> None:
        """Send all remaining output, and stop watching. May be called twice."""
        async with self._sending:  # waits until the current piece has been sent
            self._gpus.close()
            tasks, self._tasks = self._tasks, set()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for rank in self._followers:
            await self._forward_rank(rank, ended=True)
        await self._cap_once()

    def abandon(self) -> None:
        """Stop watching without sending anything more, because nobody reads it."""
        for task in self._tasks:
            task.cancel()

    # From the rank parent -------------------------------------------------------------------------------------------

    async def on_keeper(self, message: dict[str, Any]) -> None:
        """Handle the rank parent's message about this attempt."""
        number = self.number
        if "looked" in message:
            await self._on_looked(message)
        elif "dumped" in message:
            if self._dumped is not None and not self._dumped.done():
                self._dumped.set_result(message["dumped"])
        elif "started" in message:
            self._note_started(dict(message["started"]))
            ranks = tuple((rank, pid, ticks) for rank, (pid, ticks) in self.pids.items())
            await self.tell(wire.Started(number, ranks, message["time"]))
        elif "exited" in message:
            rank = message["exited"]
            self._unseen.pop(rank, None)
            self.pulse.ended(rank, message["steps"])
            await self.deliver()
            await self._forward_rank(rank, ended=True)
            told = {name: message[name] for name in ("code", "signal", "sent", "ended", "failure", "steps")}
            if not fits(told["failure"], Failure):  # a program may write anything
                told["failure"] = {}
            await self.tell(wire.Exited(number, rank, last_lines=tuple(self._last_lines(rank)), **told))
        elif "report" in message and (self.ours or fits(message["report"], RankReport)):
            await self.tell(wire.Report(number, message["rank"], message["report"]))
        elif "report" in message:
            return  # a program may write anything into its pipe
        elif "swept" in message:
            await self.close()
            await self.tell(wire.Swept(number, message["swept"], tuple(message["left"])))
        else:
            await self.tell(wire.Broken(number, message["broken"], message["code"]))

    def _note_started(self, pids: dict[int, int]) -> None:
        self.pids = {rank: (pid, processes.start_ticks(pid)) for rank, pid in pids.items()}
        if not self.ours:  # a user's program reports nothing, so we observe it
            self._unseen = dict(pids)
        ranks = [
            {"rank": start["rank"], "pid": pids[start["rank"]], "cores": start["cores"], "gpus": start["gpus"]}
            for start in self._ranks
        ]
        ticks = [[rank, each] for rank, (_, each) in self.pids.items()]
        record = {**identity(), "node": self.node, "ranks": ranks, "ticks": ticks}
        write_json(self.folder.node(self.node), record)

    def _last_lines(self, rank: int) -> list[str]:
        return last_lines(self.folder.err(rank)) or last_lines(self.folder.out(rank))

    # Progress of the ranks ------------------------------------------------------------------------------------------

    async def _look(self, keeper: KeeperLink) -> None:
        """Ask the rank parent for the ranks' progress each second, and more often while they are asked to hold."""
        while True:
            self._looked.clear()
            await keeper.order({"do": "look"})
            await self._looked.wait()
            if self._hurry.is_set():
                await asyncio.sleep(HOLD_LOOK_S)
                continue
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._hurry.wait(), LOOK_S)

    async def _on_looked(self, message: dict[str, Any]) -> None:
        self.pulse.note(message["looked"], time.monotonic())
        if not self.ours:
            written = sum(size_of(Path(start[stream])) for start in self._ranks for stream in ("out", "err"))
            self.pulse.note_output(written, time.monotonic())
        self._looked.set()
        held = self.pulse.held
        if self._hurry.is_set() and held is not None:
            self._hurry.clear()
            await self.tell(wire.Held(self.number, held))

    def progress(self, now: float) -> Progress | None:
        """Return the progress of the ranks and the utilization of their GPUs; None if no rank has been seen yet."""
        if (record := self.pulse.record(now, self._state_of)) is not None:
            for rank, told in record["ranks"].items():
                if (gpu := self._gpus.seen.get(int(rank))) is not None:
                    told["gpu"] = gpu
        return record

    def _state_of(self, rank: int) -> str:
        """Return the state of a rank's process as a letter, "" if it is gone."""
        fields = procfs.stat(self.pids[rank][0]) if rank in self.pids else None
        return "" if fields is None else fields[procfs.STATE].decode()

    def hold(self) -> None:
        """Ask for progress more often from now on, and report when a rank waits between two steps."""
        self._hurry.set()

    async def dump(self, keeper: KeeperLink) -> None:
        """Make the ranks write their stacks, and send them."""
        if self._dumped is not None and not self._dumped.done():
            return  # a dump is already in progress
        self._dumped = asyncio.get_running_loop().create_future()
        dumps = Dumps({start["rank"]: self.folder.err(start["rank"]) for start in self._ranks})
        await keeper.order({"do": "look"})  # answered before the dump, with each rank's current progress
        await keeper.order({"do": "dump"})
        try:
            states = await asyncio.wait_for(self._dumped, ASK_S)
        except asyncio.TimeoutError:  # the rank parent itself hangs
            states = {}
        lines = await dumps.gather(list(map(int, states)))
        told: list[Stack] = [
            {"rank": rank, "state": state, "lines": tuple(lines.get(rank, ())), **self.pulse.seen(rank)}  # type: ignore[typeddict-item]
            for rank, state in ((int(text), state) for text, state in states.items())
        ]
        await self.tell(wire.Stacks(self.number, tuple(told)))

    async def _take_census(self) -> None:
        """Report users' programs that have connected to the store."""
        assert self.start is not None
        while True:
            for rank in census.connected(self._unseen, self.start.master_port) if self._unseen else ():
                self._unseen.pop(rank, None)
                await self.tell(wire.Report(self.number, rank, {"report": "arrived"}))
            await asyncio.sleep(LOOK_S)

    # What ranks write -----------------------------------------------------------------------------------------------

    async def _forward(self) -> None:
        """Send the lines of the console's ranks to the supervisor, and also the files that it cannot see."""
        while True:
            for rank in self._followers:
                await self._forward_rank(rank)
            await self.deliver()
            await asyncio.sleep(FOLLOW_S)

    async def deliver(self) -> None:
        """Send new data in this node's part of the run folder, if the supervisor cannot see it."""
        if self._courier is None:
            return
        async with self._sending:
            for piece in self._courier.news():
                await self.tell(wire.File(self.number, *piece))

    async def _cap(self) -> None:
        """Limit the size of the ranks' logs."""
        while True:
            await self._cap_once()
            await asyncio.sleep(LOOK_S)

    async def _cap_once(self) -> None:
        await self.deliver()  # send the parts that will be freed
        for start in self._ranks:
            for stream in ("out", "err"):
                logcap.cap(Path(start[stream]))

    async def _forward_rank(self, rank: int, *, ended: bool = False) -> None:
        async with self._sending:
            await self._send_lines(rank, ended=ended)

    async def _send_lines(self, rank: int, *, ended: bool) -> None:
        for stream, follower in self._followers.get(rank, {}).items():
            batch: list[str] = []
            room = BATCH_BYTES
            for line in chain(follower.poll(), follower.flush() if ended else ()):
                batch.append(line.decode(errors="replace"))
                room -= len(line) + 1
                if room < 0:
                    await self.tell(wire.Log(self.number, rank, stream, tuple(batch)))
                    batch, room = [], BATCH_BYTES
            if batch:
                await self.tell(wire.Log(self.number, rank, stream, tuple(batch)))


def last_lines(path: Path) -> list[str]:
    """Return the last lines of a log, with long lines cut, since a verdict becomes one row of a log."""
    lines = tail_lines(path, LAST_LINES)
    return [line if len(line) <= LONGEST_LAST else f"{line[:LONGEST_LAST]}… ({len(line)} characters)" for line in lines]


async def gone(ranks: Collection[RankProcessId]) -> list[int]:
    """Wait up to GONE_S for processes that should end; return the pids of those that are still alive."""
    deadline = time.monotonic() + GONE_S
    while left := [pid for pid, ticks in ranks if ticks is not None and processes.is_same(pid, ticks)]:
        if time.monotonic() > deadline:
            break
        await asyncio.sleep(GONE_LOOK_S)
    return left
