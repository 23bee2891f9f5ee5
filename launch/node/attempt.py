"""One attempt on one node: follow the output and progress of its ranks, and report how each of them ended.

The agent (`serve.py`) and the rank parent outlive the attempt. Every message carries the attempt's number, so that late
messages are recognised.
"""

import asyncio
import contextlib
import sys
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, Final, Literal

from muster.jobs.basics.errors import MusterError
from muster.jobs.basics.files import write_json
from muster.jobs.basics.terminal import cut
from muster.jobs.machine import procfs
from muster.jobs.node import logcap
from muster.jobs.runfolder.rundir import AttemptDir, RunDir
from muster.launch.common import processes, storage
from muster.launch.common.follow import LineFollower, decoded, tail_lines
from muster.launch.common.host import identity
from muster.launch.node import census
from muster.launch.node.dumping import Dumps, size_of
from muster.launch.node.gathering import GATHER_S, Gathering
from muster.launch.node.gpus import GpuWatch
from muster.launch.node.pulse import Pulse
from muster.launch.node.rank_parent_link import RankParentLink
from muster.launch.wire import messages as wire
from muster.launch.wire.codec import fits
from muster.launch.wire.records import Failure, Progress, RankReport, RankStacks

LOOK_S: Final = 1.0
HOLD_LOOK_S: Final = 0.02
FOLLOW_S: Final = 0.1
LAST_LINES: Final = 20
LONGEST_LAST: Final = 1000  # characters
BATCH_CHARACTERS: Final = 1 << 18  # maximum of a rank's output in one message, and one line more
BATCH_LINES: Final = 1 << 13  # maximum lines in one message
GONE_S: Final = 2.0  # time limit for ranks to end after their parent has died
GONE_LOOK_S: Final = 0.02
ASK_S: Final = 1.0  # time limit for the rank parent's answer to a dump order

RankProcessId = tuple[int, int | None]  # (pid, start time in clock ticks since boot); None: already ended
Tell = Callable[[wire.FromAgent], Awaitable[None]]
Guard = Callable[[Coroutine[Any, Any, None]], Coroutine[Any, Any, None]]


class NodeAttempt:
    """The ranks of one attempt on this node. `slot`: the node's number until the start message assigns another."""

    def __init__(self, number: int, slot: int, tell: Tell, guard: Guard) -> None:
        self.number = number
        self.node = slot
        self.start: wire.Start | None = None
        self.pids: dict[int, RankProcessId] = {}
        self.tell = tell  # send a message to the supervisor
        self._guard = guard
        self._gathering = Gathering(number, tell, lambda: self._watch(self._flush_late()))
        self._unseen: dict[int, int] = {}  # {rank: pid} of user programs that have not connected to the store yet
        self._followers: dict[int, dict[Literal["out", "err"], LineFollower]] = {}
        self._courier: storage.Courier | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._sending = asyncio.Lock()  # only one task at a time reads and sends output
        self.pulse = Pulse()
        self._gpus = GpuWatch({})
        self._looked = asyncio.Event()
        self._hurry = asyncio.Event()  # set by `hold`: sample faster; cleared when a rank waits between steps
        self._dumped: asyncio.Future[dict[str, str]] | None = None

    @property
    def ours(self) -> bool:
        """True when the ranks run Muster's own functions, not a user's program."""
        return any("argv" not in start for start in self._ranks)

    @property
    def _ranks(self) -> tuple[dict[str, Any], ...]:
        return self.start.ranks if self.start is not None else ()

    @property
    def folder(self) -> AttemptDir:
        """The attempt's folder inside the run folder, at its path on this node."""
        assert self.start is not None
        return AttemptDir(Path(self.start.attempt_dir))

    # Start and end --------------------------------------------------------------------------------------------------

    def open(self, message: wire.Start) -> None:
        """Record the start message. If this node does not share the run folder, create the attempt's folder here."""
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

    def extend(self, message: wire.Start) -> None:
        """Add ranks that join while the others work."""
        assert self.start is not None
        self.start = replace(self.start, ranks=(*self.start.ranks, *message.ranks))

    def follow(self, rank_parent: RankParentLink) -> None:
        """Start watching the ranks. Call this after ordering them to start."""
        for work in (
            self._forward(),
            self._cap(),
            self._look(rank_parent),
            *(() if self.ours else (self._take_census(),)),
        ):
            self._watch(work)
        # The i-th rank of the node uses the i-th of the GPUs that are visible to it.
        if names := {
            each["rank"]: each["gpus"][place] for place, each in enumerate(self._ranks) if each["gpus"][place:]
        }:
            self._gpus = GpuWatch(names)

    def _watch(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(self._guard(work))
        self._tasks.add(task)
        task.add_done_callback(lambda _: work.close())  # avoids a warning if the task is cancelled before its start

    def tell_programs(self, message: wire.StopRanks) -> None:
        """Write a file that gives users' programs the reason for the stop and its deadline (Unix seconds)."""
        if self.start is None or self.ours or not message.reason:
            return
        told = {"reason": message.reason, "message": message.text, "deadline": time.time() + message.grace_s}
        with self._printing_errors():  # the programs are stopped even if the file cannot be written
            write_json(self.folder.stop(self.node), told)

    def ask_to_save(self) -> None:
        """Handle SIGUSR1: ask rank 0 for a checkpoint by a file in the run folder, which must be shared."""
        if self.start is not None:
            with self._printing_errors():
                RunDir(self.folder.path.parent).ask_to_save(f"SIGUSR1 at node {self.node}")

    @contextlib.contextmanager
    def _printing_errors(self) -> Iterator[None]:
        """Print a MusterError of the `with` block to standard error, and continue."""
        try:
            yield
        except MusterError as error:
            print(f"muster agent of node {self.node}: {error}", file=sys.stderr)

    async def close(self) -> None:
        """Stop watching, and send all remaining output. May be called twice."""
        async with self._sending:  # waits until the current piece has been sent
            self._gpus.close()
            tasks, self._tasks = self._tasks, set()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for rank in self._followers:
            await self._forward_rank(rank, ended=True)
        await self._gathering.flush()
        await self._cap_once()

    def abandon(self) -> None:
        """Stop watching without sending the remaining output, because the supervisor no longer reads it."""
        for task in self._tasks:
            task.cancel()

    # From the rank parent -------------------------------------------------------------------------------------------

    async def on_rank_parent(self, message: dict[str, Any]) -> None:
        """Handle a message from the rank parent about this attempt."""
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
            if not fits(told["failure"], Failure):  # a program may write any JSON here
                told["failure"] = {}
            await self._gathering.exited(wire.Exited(number, rank, last_lines=tuple(self._last_lines(rank)), **told))
        elif "report" in message and (self.ours or fits(message["report"], RankReport)):
            await self._gathering.report(message["rank"], message["report"], len(self._ranks))
        elif "report" in message:
            return  # ignore it: a program may write anything into its report pipe
        elif "swept" in message:
            await self.close()
            await self.tell(wire.Swept(number, message["swept"], tuple(message["left"])))
        else:
            await self.tell(wire.Broken(number, message["broken"], message["code"]))

    async def _flush_late(self) -> None:
        await asyncio.sleep(GATHER_S)
        await self._gathering.flush()

    def _note_started(self, pids: dict[int, int]) -> None:
        self.pids = {rank: (pid, processes.start_ticks(pid)) for rank, pid in pids.items()}
        if not self.ours:  # a user's program does not report its arrival, so look for its connection
            self._unseen = dict(pids)
        ranks = [
            {"rank": start["rank"], "pid": pids[start["rank"]], "cores": start["cores"], "gpus": start["gpus"]}
            for start in self._ranks
            if start["rank"] in pids  # a rank that continues in place may have died meanwhile
        ]
        ticks = [[rank, each] for rank, (_, each) in self.pids.items()]
        record = {**identity(), "node": self.node, "ranks": ranks, "ticks": ticks}
        write_json(self.folder.node(self.node), record)

    def _last_lines(self, rank: int) -> list[str]:
        return last_lines(self.folder.err(rank)) or last_lines(self.folder.out(rank))

    # Progress of the ranks ------------------------------------------------------------------------------------------

    async def _look(self, rank_parent: RankParentLink) -> None:
        """Ask the rank parent for the ranks' progress every LOOK_S, or HOLD_LOOK_S after the order to hold."""
        while True:
            self._looked.clear()
            await rank_parent.order({"do": "look"})
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
        """Return the state letter of a rank's process (proc(5)), "" if the process has ended."""
        fields = procfs.stat(self.pids[rank][0]) if rank in self.pids else None
        return "" if fields is None else fields[procfs.STATE].decode()

    def hold(self) -> None:
        """Poll progress more often until a rank waits between two steps, and report that to the supervisor."""
        self._hurry.set()

    async def dump(self, rank_parent: RankParentLink) -> None:
        """Make the ranks write their stacks, and send the stacks to the supervisor."""
        if self._dumped is not None and not self._dumped.done():
            return  # a dump is already in progress
        self._dumped = asyncio.get_running_loop().create_future()
        dumps = Dumps({start["rank"]: self.folder.err(start["rank"]) for start in self._ranks})
        await rank_parent.order({"do": "look"})  # answered first, so that the reported progress is current
        await rank_parent.order({"do": "dump"})
        try:
            states = await asyncio.wait_for(self._dumped, ASK_S)
        except asyncio.TimeoutError:  # the rank parent itself hangs
            states = {}
        lines = await dumps.gather(list(map(int, states)))
        told: list[RankStacks] = [
            {"rank": rank, "state": state, "lines": tuple(lines.get(rank, ())), **self.pulse.seen(rank)}  # type: ignore[typeddict-item]
            for rank, state in ((int(text), state) for text, state in states.items())
        ]
        await self.tell(wire.Stacks(self.number, tuple(told)))

    async def _take_census(self) -> None:
        """Report each user program as arrived once it has connected to the store."""
        assert self.start is not None
        while True:
            found = census.connected(self._unseen, self.start.master_port) if self._unseen else ()
            for rank in found:
                self._unseen.pop(rank, None)
            if found:
                await self.tell(wire.Report(self.number, tuple(found), {"report": "arrived"}))
            await asyncio.sleep(LOOK_S)

    # Output of the ranks --------------------------------------------------------------------------------------------

    async def _forward(self) -> None:
        """Send the supervisor the output that its console shows, and new data in files that it cannot see."""
        while True:
            for rank in self._followers:
                await self._forward_rank(rank)
            await self.deliver()
            await asyncio.sleep(FOLLOW_S)

    async def deliver(self) -> None:
        """If this node does not share the supervisor's run folder, send the new data in its own folder."""
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
        await self.deliver()  # send the data before capping discards it
        for start in self._ranks:
            for stream in ("out", "err"):
                logcap.cap(Path(start[stream]))

    async def _forward_rank(self, rank: int, *, ended: bool = False) -> None:
        async with self._sending:
            await self._send_lines(rank, ended=ended)

    async def _send_lines(self, rank: int, *, ended: bool) -> None:
        for stream, follower in self._followers.get(rank, {}).items():
            batch: list[str] = []
            room = BATCH_CHARACTERS
            for line in chain(follower.poll(), follower.flush() if ended else ()):
                batch.append(cut(decoded(line)))
                room -= len(batch[-1]) + 1
                if room < 0 or len(batch) == BATCH_LINES:
                    await self.tell(wire.Log(self.number, rank, stream, tuple(batch)))
                    batch, room = [], BATCH_CHARACTERS
            if batch:
                await self.tell(wire.Log(self.number, rank, stream, tuple(batch)))


def last_lines(path: Path) -> list[str]:
    """Return the last lines of a log. Long lines are cut, because a verdict that quotes them is one row of a file."""
    lines = tail_lines(path, LAST_LINES)
    return [line if len(line) <= LONGEST_LAST else f"{line[:LONGEST_LAST]}… ({len(line)} characters)" for line in lines]


async def gone(ranks: Collection[RankProcessId]) -> list[int]:
    """Wait up to GONE_S for processes to end; return the pids of the processes that are still alive."""
    deadline = time.monotonic() + GONE_S
    while left := [pid for pid, ticks in ranks if ticks is not None and processes.is_same(pid, ticks)]:
        if time.monotonic() > deadline:
            break
        await asyncio.sleep(GONE_LOOK_S)
    return left
