"""The agent's main loop. In every attempt it starts, watches and stops its node's ranks, through the rank parent.

When the channel closes or the lease expires, the agent closes the rank parent's socket. The rank parent then stops the
ranks (TERM, 1 s, KILL), and the agent ends all other processes that it started.
"""

import asyncio
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Final

from muster.jobs.basics import terminal
from muster.jobs.basics.errors import MusterError
from muster.jobs.basics.exits import REFUSED, UNREACHABLE
from muster.jobs.machine import linux, network, ports
from muster.jobs.node import leftovers
from muster.jobs.runfolder.rundir import RunDir
from muster.launch.common import storage
from muster.launch.common.lateness import OwnLateness
from muster.launch.node import setup_lines
from muster.launch.node.attempt import NodeAttempt, RankProcessId, gone
from muster.launch.node.copies import Copies
from muster.launch.node.rank_parent_link import RankParentLink
from muster.launch.wire import messages as wire
from muster.launch.wire.channel import Channel, ChannelClosed, over_pipes, over_socket
from muster.launch.wire.records import Facts, Leftover

LOOK_S: Final = 0.25
LATE_KEPT: Final = 0.98  # decay of the reported lateness per check: it halves in 9 s
BACKLOG: Final = 4096  # all ranks may connect before the store accepts the first
REACH_S: Final = 5.0
LONGEST_WHY: Final = 4000  # characters


class Agent:
    """The agent of one node. `lease_s`: how long the supervisor may be silent; 0: no limit, as on a pipe."""

    def __init__(self, node: int, channel: Channel, rank_parent: socket.socket | None, lease_s: float) -> None:
        self.node = node
        self.channel = channel
        self.rank_parent = RankParentLink(rank_parent)
        self.lease_s = lease_s
        self.heard = time.monotonic()
        self.alone = False  # the lease has expired: the supervisor has been silent for too long
        self.late_s = 0.0
        self.attempt = self._new_attempt(0)
        self.before: set[RankProcessId] = set()  # ranks of earlier attempts; if one still runs, it has lost its parent
        self.listening: socket.socket | None = None  # the store's socket, until the rank parent has it
        self.starting: asyncio.Task[None] | None = None
        self.set_up: list[str] | None = None  # the setup lines that have already run
        self.changed: setup_lines.Changes = {}  # the changes that these lines made to the environment
        self.tasks: set[asyncio.Task[None]] = set()
        self.copies = Copies(channel.send)

    async def run(self) -> int:
        """Serve until the supervisor sends Bye, the lease expires or the channel closes; return the run's exit code."""
        code = UNREACHABLE
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._on_term)
        self._spawn(self._watch_lease())
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, lambda: self.attempt.ask_to_save())
        try:
            while not isinstance(message := await self.channel.receive(), wire.Bye):
                self.heard = time.monotonic()
                await self._guard(self._obey(message))
            code = message.code
            await self.attempt.close()
        except ChannelClosed:
            pass  # the supervisor has ended; clean up as after Bye
        self.attempt.abandon()
        self.copies.close()
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.rank_parent.close()
        for pid in linux.descendants(os.getpid()):
            linux.kill_quietly(pid, signal.SIGKILL)
        return code

    async def _obey(self, message: wire.ToAgent) -> None:
        match message:
            case wire.Beat():
                await self._beat(message)
            case wire.Inspect():
                await self._inspect(message)
            case wire.Prepare():
                await self._prepare(message)
            case wire.Reach():
                await self._turn_to(message.attempt)
                self._spawn(self._try_reach(message, self.attempt))
            case wire.Start():
                await self._turn_to(message.attempt)
                self.starting = self._spawn(self._begin(self.attempt, message))
                if any("adopt" in start for start in message.ranks):  # the next attempt builds on these orders
                    await self.starting
            case wire.StopRanks():
                await self._stop(message)
            case wire.Hold() if self._is_running(message.attempt):
                await self.rank_parent.order({"do": "hold"})
                self.attempt.hold()
            case wire.StopAt() if self._is_running(message.attempt):
                await self.rank_parent.order({"do": "stop_at", "steps": message.steps, "regroups": message.regroups})
            case wire.Dump() if self._is_running(message.attempt):
                self._spawn(self.attempt.dump(self.rank_parent))
            case wire.Dump():
                await self.channel.send(wire.Stacks(message.attempt, ()))
            case wire.KeepCopies():
                await self.copies.keep(message)
            case wire.CopyTo():
                self.copies.copy_to(message)
            case wire.Complete():
                await asyncio.to_thread(self.copies.mark, message)
            case wire.Fetch():
                self._spawn(self.copies.fetch(message))

    def _on_term(self) -> None:
        """Report SIGTERM, which usually means that a scheduler ends the job, so that the whole run stops cleanly."""
        asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)  # a second SIGTERM ends this process
        self._spawn(self.channel.send(wire.Terminated(self.attempt.number)))

    async def _watch_lease(self) -> None:
        """Abort the channel when the lease expires. Time in which this process did not run does not count."""
        own = OwnLateness(LOOK_S)
        own.look(now := time.monotonic())
        while not self.lease_s or now - self.heard < self.lease_s:
            await asyncio.sleep(LOOK_S)
            now = time.monotonic()
            late_s = own.look(now)
            self.heard = min(now, self.heard + late_s)
            self.late_s = max(late_s, LATE_KEPT * self.late_s)
        print(f"muster agent of node {self.node}: the supervisor was silent for {self.lease_s:g} s", file=sys.stderr)
        self.alone = True
        self.channel.abort()

    async def _beat(self, message: wire.Beat) -> None:
        """Answer a beat with the times of receipt and reply, from which the supervisor computes the clock offset."""
        heard, number = time.time(), self.attempt.number
        progress = self.attempt.progress(time.monotonic())
        if progress is not None and not message.ranks:
            progress = {**progress, "ranks": {}}
        await self.channel.send(wire.Heartbeat(number, message.sent, heard, time.time(), progress, self.late_s))

    # Before the start -----------------------------------------------------------------------------------------------

    async def _inspect(self, message: wire.Inspect) -> None:
        from muster.launch.node.nodefacts import facts

        self._spawn(self._answer(facts, message))

    async def _answer(self, facts: Callable[[wire.Inspect], Facts], message: wire.Inspect) -> None:
        found = await asyncio.to_thread(facts, message)
        await self.channel.send(wire.Inspected(self.attempt.number, found))

    async def _prepare(self, message: wire.Prepare) -> None:
        """Bind the store's port and report it. The port stays bound, so that no other process can take it."""
        await self._turn_to(message.attempt)
        self._close_listening()
        addresses = network.own_addresses()
        bind = network.bindable(message.bind, message.iface, addresses)
        self.listening = ports.bind(bind, backlog=BACKLOG)
        port = self.listening.getsockname()[1]
        await self.channel.send(wire.Prepared(self.attempt.number, port, bind, tuple(addresses)))

    # The route to the master, and the run folder --------------------------------------------------------------------

    async def _try_reach(self, message: wire.Reach, attempt: NodeAttempt) -> None:
        """Test the things that ranks will need: the route to the master, and the run folder."""
        from muster.launch.common.fingerprint import fingerprint

        address, port = message.address, message.port
        route = network.choose(network.own_addresses(), message.iface) if message.iface else None
        route = route or network.route_to(address)
        why = ""
        try:
            _, writer = await asyncio.wait_for(asyncio.open_connection(address, port), REACH_S)
            writer.close()
        except asyncio.TimeoutError:
            why = f"no answer within {REACH_S:g} s"
        except OSError as error:
            why = os.strerror(error.errno) if error.errno else str(error)  # asyncio's own text repeats the address
        found = storage.find(RunDir(Path(message.run)), message.nonce)
        interface, own = route or ("", "")
        await self.channel.send(
            wire.Reached(attempt.number, interface=interface, address=own, why=why, code=fingerprint(), **found)  # type: ignore[arg-type]
        )

    # Attempts -------------------------------------------------------------------------------------------------------

    def _new_attempt(self, number: int) -> NodeAttempt:
        return NodeAttempt(number, self.node, self.channel.send, self._guard)

    async def _turn_to(self, number: int) -> None:
        """Switch to attempt `number`, unless it is the current one."""
        if number != self.attempt.number:
            await self._end_start()
            await self.attempt.close()
            self._close_listening()
            self.before |= set(self.attempt.pids.values())
            self.attempt = self._new_attempt(number)

    async def _end_start(self) -> None:
        """Cancel a start that is in progress: its setup lines may still be running."""
        if self.starting is not None and not self.starting.done():
            self.starting.cancel()
            await asyncio.gather(self.starting, return_exceptions=True)

    def _close_listening(self) -> None:
        if self.listening is not None:
            self.listening.close()
            self.listening = None

    async def _begin(self, attempt: NodeAttempt, message: wire.Start) -> None:
        if message.joins and attempt.start is not None and self.rank_parent.is_open:
            attempt.extend(message)
            await self._order_start(attempt, message)
            return
        attempt.open(message)
        setup, warm = list(message.setup), message.warm
        if setup and setup != self.set_up:  # run the lines once per node, not once per attempt
            log = attempt.folder.setup(attempt.node)
            self.changed = await setup_lines.run(setup, log, message.workdir, warm["env"])
            self.set_up = setup
        if not self.rank_parent.is_open:
            await self._ranks_gone()
            environ = {**os.environ, **warm["env"]}
            if setup and warm["python"]:  # the job's Python may need these changes
                environ = setup_lines.environ_after(environ, self.changed)
            await self.rank_parent.open(preload=warm["preload"], env=environ, of_job=warm["python"])
            self._spawn(self._watch_rank_parent(self.rank_parent))
        in_place = any("adopt" in start for start in message.ranks)
        if in_place:  # ranks wait already: a store takes longer to start, and connections wait in its backlog
            await self._order_start(attempt, message)
        if self.listening is not None and message.store:
            await self.rank_parent.give_store(self.listening, attempt.number)
        self._close_listening()  # the rank parent now has the socket, or rank 0 binds the port itself
        if not in_place:
            await self._order_start(attempt, message)
        attempt.follow(self.rank_parent)

    async def _order_start(self, attempt: NodeAttempt, message: wire.Start) -> None:
        changed = self.changed if message.setup else {}
        own = self.copies.environment()
        starts = [{**start, "env": {**start["env"], **own}} for start in message.ranks]
        ranks = [setup_lines.with_changes(start, changed) for start in starts]
        order = {"do": "start", "attempt": attempt.number, "joins": message.joins, "ranks": ranks}
        await self.rank_parent.order(order)

    async def _stop(self, message: wire.StopRanks) -> None:
        if message.attempt != self.attempt.number:  # the message is about an attempt that never started here
            await self.channel.send(wire.Swept(message.attempt, 0, ()))
            return
        await self._end_start()
        self._close_listening()
        self.attempt.tell_programs(message)
        if self.rank_parent.is_open:
            await self.rank_parent.order({"do": "stop", "grace_s": message.grace_s, "attempt": self.attempt.number})
            return
        left: list[Leftover] = [{**each, "rank": None} for each in leftovers.described(await self._ranks_gone())]  # type: ignore[typeddict-item]
        await self.attempt.close()
        await self.channel.send(wire.Swept(self.attempt.number, 0, tuple(left)))

    def _is_running(self, number: int) -> bool:
        """Return whether the attempt is the current one and has started ranks here."""
        return number == self.attempt.number and self.rank_parent.is_open and bool(self.attempt.pids)

    async def _watch_rank_parent(self, rank_parent: RankParentLink) -> None:
        async for message in rank_parent.messages():
            if "ready" in message:
                await self.channel.send(wire.Ready(self.attempt.number, message["ready"]))
            elif message.get("attempt", self.attempt.number) == self.attempt.number:
                await self.attempt.on_rank_parent(message)
        if self.rank_parent is rank_parent:
            self.rank_parent = RankParentLink(None)  # the next attempt starts another rank parent
        await self.attempt.close()
        if why := rank_parent.unusable:
            await self.channel.send(wire.Broken(self.attempt.number, why, REFUSED))
        else:
            why = "its warm process or rank parent has ended"
            await self.channel.send(wire.Broken(self.attempt.number, why, UNREACHABLE, gone=True))
        await rank_parent.close()

    async def _ranks_gone(self) -> list[int]:
        """Wait for ranks whose parent has ended; return the pids of the ranks that are still alive."""
        return await gone(self.before | set(self.attempt.pids.values()))

    # Plumbing -------------------------------------------------------------------------------------------------------

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(self._guard(work))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        task.add_done_callback(lambda _: work.close())  # avoids a warning if the task was cancelled before its start
        return task

    async def _guard(self, work: Coroutine[Any, Any, None]) -> None:
        """Await a coroutine. Report any error as a failure of the whole node, so that it is not left half working."""
        try:
            await work
        except ChannelClosed:
            return  # the main loop notices the closed channel too, and ends the agent
        except Exception as error:
            if not isinstance(error, MusterError):
                traceback.print_exc()
            why = (str(error) or type(error).__name__)[:LONGEST_WHY]
            await self.channel.send(wire.Broken(self.attempt.number, why, getattr(error, "exit_code", 1)))


def serve(node: int, carrier: int, rank_parent: int | None, lease_s: float, alone: str) -> int:
    """Run the agent after its greeting. `carrier`: the descriptor of a connected socket; -1: the standard streams.

    `alone`: what to do with the surrounding Slurm job when the lease expires: `requeue`, `cancel`, or nothing ("").
    Returns the run's exit code, or 69 if the connection to the supervisor was lost.
    """
    terminal.guard()  # an agent started by hand prints to the user's terminal
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor handles Ctrl-C
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    linux.adopt_orphans()

    async def work() -> tuple[int, bool]:
        if carrier >= 0:
            channel = await over_socket(socket.socket(fileno=carrier))
        else:
            channel = await over_pipes(os.fdopen(os.dup(0), "rb", 0), os.fdopen(os.dup(1), "wb", 0))
            os.dup2(2, 1)  # printed text must not get into the channel
        own = socket.socket(fileno=rank_parent) if rank_parent is not None else None
        agent = Agent(node, channel, own, lease_s)
        return await agent.run(), agent.alone

    code, is_alone = asyncio.run(work())
    if is_alone and alone:
        from muster.slurm.client import end_orphan

        print(f"muster agent of node {node}: {end_orphan(os.environ, requeue=alone == 'requeue')}", file=sys.stderr)
    return code
