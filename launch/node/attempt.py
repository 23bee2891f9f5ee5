"""One attempt on one node: what its ranks write, how far they are, and how each ended.

The agent (`serve.py`) lives longer than it, and so does the keeper. Everything that it tells carries its number, so
that what comes late is known as such.
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
GONE_S: Final = 2.0  # for ranks to be dead whose keeper is
GONE_LOOK_S: Final = 0.02
ASK_S: Final = 1.0  # for the keeper to ask the ranks for their stacks

RankProcessId = tuple[int, int | None]  # pid, and when it began in clock ticks after boot; None: it was gone already
Tell = Callable[[wire.FromAgent], Awaitable[None]]
Guard = Callable[[Coroutine[Any, Any, None]], Coroutine[Any, Any, None]]


class NodeAttempt:
    """An attempt's ranks on this node. `slot` is the node's number where the start message gives it none."""

    def __init__(self, number: int, slot: int, tell: Tell, guard: Guard) -> None:
        self.number = number
        self.node = slot
        self.start: wire.Start | None = None
        self.pids: dict[int, RankProcessId] = {}
        self.tell = tell  # the supervisor
        self._guard = guard
        self._unseen: dict[int, int] = {}  # {rank: pid} of programs that have not been seen at the store
        self._followers: dict[int, dict[Literal["out", "err"], LineFollower]] = {}
        self._courier: storage.Courier | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._sending = asyncio.Lock()  # a file is read by one task at a time
        self.pulse = Pulse()
        self._gpus = GpuWatch({})
        self._looked = asyncio.Event()
        self._hurry = asyncio.Event()  # set while ranks are asked to hold, and none has been seen to
        self._dumped: asyncio.Future[dict[str, str]] | None = None

    @property
    def ours(self) -> bool:
        """True when its ranks run functions of ours."""
        return any("argv" not in start for start in self._ranks)

    @property
    def _ranks(self) -> tuple[dict[str, Any], ...]:
        return self.start.ranks if self.start is not None else ()

    @property
    def folder(self) -> AttemptDir:
        """Its part of the run folder, as this node sees it."""
        assert self.start is not None
        return AttemptDir(Path(self.start.attempt_dir))

    # Its beginning and its end --------------------------------------------------------------------------------------

    def open(self, message: wire.Start) -> None:
        """Take the start message; make what it needs of the run folder."""
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
        """Begin to watch: the ranks have been ordered to start."""
        for work in (self._forward(), self._cap(), self._look(keeper), *(() if self.ours else (self._take_census(),))):
            self._watch(work)
        # The ranks of a node take its GPUs in turn.
        if names := {
            each["rank"]: each["gpus"][place] for place, each in enumerate(self._ranks) if each["gpus"][place:]
        }:
            self._gpus = GpuWatch(names)

    def _watch(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(self._guard(work))
        self._tasks.add(task)
        task.add_done_callback(lambda _: work.close())  # of a task that was cancelled before it began

    def tell_programs(self, message: wire.StopRanks) -> None:
        """Write for the user's programs why and until when (unix seconds) they may end by themselves."""
        if self.start is None or self.ours or not message.reason:
            return
        told = {"reason": message.reason, "message": message.text, "deadline": time.time() + message.grace_s}
        with self._saying():  # they are stopped all the same
            write_json(self.folder.stop(self.node), told)

    def ask_to_save(self) -> None:
        """Answer SIGUSR1: ask rank 0 for a checkpoint, by the run folder, which nodes share where ranks save."""
        if self.start is not None:
            with self._saying():
                RunDir(self.folder.path.parent).ask_to_save(f"SIGUSR1 at node {self.node}")

    @contextlib.contextmanager
    def _saying(self) -> Iterator[None]:
        """Say on standard error that something cannot be written, and go on."""
        try:
            yield
        except MusterError as error:
            print(f"muster agent of node {self.node}: {error}", file=sys.stderr)

    async def close(self) -> None:
        """Send what is still to be sent, and watch no more; may come twice."""
        async with self._sending:  # not in the middle of what has been read already
            self._gpus.close()
            tasks, self._tasks = self._tasks, set()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for rank in self._followers:
            await self._forward_rank(rank, ended=True)
        await self._cap_once()

    def abandon(self) -> None:
        """Watch no more, whatever is still to be sent: nobody takes it."""
        for task in self._tasks:
            task.cancel()

    # From the keeper ------------------------------------------------------------------------------------------------

    async def on_keeper(self, message: dict[str, Any]) -> None:
        """Take what the keeper tells of this attempt."""
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
            return  # what a program has written into its pipe, which may be anything
        elif "swept" in message:
            await self.close()
            await self.tell(wire.Swept(number, message["swept"], tuple(message["left"])))
        else:
            await self.tell(wire.Broken(number, message["broken"], message["code"]))

    def _note_started(self, pids: dict[int, int]) -> None:
        self.pids = {rank: (pid, processes.start_ticks(pid)) for rank, pid in pids.items()}
        if not self.ours:  # a program of the user's: it tells us nothing, so we look
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

    # How far the ranks are ------------------------------------------------------------------------------------------

    async def _look(self, keeper: KeeperLink) -> None:
        """Ask the keeper how far the ranks are: each second, and often while they are asked to hold."""
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
        """Return how far the ranks are, and how busy their GPUs; None as long as no rank has been seen."""
        if (record := self.pulse.record(now, self._state_of)) is not None:
            for rank, told in record["ranks"].items():
                if (gpu := self._gpus.seen.get(int(rank))) is not None:
                    told["gpu"] = gpu
        return record

    def _state_of(self, rank: int) -> str:
        """Return the letter of the state of a rank's process, "" if it is gone."""
        fields = procfs.stat(self.pids[rank][0]) if rank in self.pids else None
        return "" if fields is None else fields[procfs.STATE].decode()

    def hold(self) -> None:
        """Look often from now on, and tell once a rank waits between two steps."""
        self._hurry.set()

    async def dump(self, keeper: KeeperLink) -> None:
        """Have the ranks write their stacks, and send these."""
        if self._dumped is not None and not self._dumped.done():
            return  # one is on its way
        self._dumped = asyncio.get_running_loop().create_future()
        dumps = Dumps({start["rank"]: self.folder.err(start["rank"]) for start in self._ranks})
        await keeper.order({"do": "look"})  # answered before the dump: how far each is by now
        await keeper.order({"do": "dump"})
        try:
            states = await asyncio.wait_for(self._dumped, ASK_S)
        except asyncio.TimeoutError:  # the keeper itself stands still
            states = {}
        lines = await dumps.gather(list(map(int, states)))
        told: list[Stack] = [
            {"rank": rank, "state": state, "lines": tuple(lines.get(rank, ())), **self.pulse.seen(rank)}  # type: ignore[typeddict-item]
            for rank, state in ((int(text), state) for text, state in states.items())
        ]
        await self.tell(wire.Stacks(self.number, tuple(told)))

    async def _take_census(self) -> None:
        """Look which programs of the user's have come to the store."""
        assert self.start is not None
        while True:
            for rank in census.connected(self._unseen, self.start.master_port) if self._unseen else ():
                self._unseen.pop(rank, None)
                await self.tell(wire.Report(self.number, rank, {"report": "arrived"}))
            await asyncio.sleep(LOOK_S)

    # What ranks write -----------------------------------------------------------------------------------------------

    async def _forward(self) -> None:
        """Send what the console's ranks print to the supervisor, line by line, and files that it cannot see."""
        while True:
            for rank in self._followers:
                await self._forward_rank(rank)
            await self.deliver()
            await asyncio.sleep(FOLLOW_S)

    async def deliver(self) -> None:
        """Send what is new in this node's part of the run folder, where the supervisor cannot see it."""
        if self._courier is None:
            return
        async with self._sending:
            for piece in self._courier.news():
                await self.tell(wire.File(self.number, *piece))

    async def _cap(self) -> None:
        """Keep the ranks' logs from filling the disk."""
        while True:
            await self._cap_once()
            await asyncio.sleep(LOOK_S)

    async def _cap_once(self) -> None:
        await self.deliver()  # what is freed has been sent home before
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
    """Return the last lines of a log, long ones cut: a verdict is one row of a log."""
    lines = tail_lines(path, LAST_LINES)
    return [line if len(line) <= LONGEST_LAST else f"{line[:LONGEST_LAST]}… ({len(line)} characters)" for line in lines]


async def gone(ranks: Collection[RankProcessId]) -> list[int]:
    """Wait for the end of processes that are about to end, for `GONE_S`; return the pids of those that live on."""
    deadline = time.monotonic() + GONE_S
    while left := [pid for pid, ticks in ranks if ticks is not None and processes.is_same(pid, ticks)]:
        if time.monotonic() > deadline:
            break
        await asyncio.sleep(GONE_LOOK_S)
    return left
