"""A whole supervisor of a training on four nodes with a rank each, whose agents are the test: no process, no network.

The agents do what is usual at once, but for joiners, which are ready when the test says so.
"""

import asyncio
import json
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from muster.jobs.basics.files import read_lines
from muster.jobs.hosts.placement import Host, place
from muster.jobs.runfolder.rundir import RunDir, make_run
from muster.jobs.spec.failover import CheckpointSettings, RestartSettings
from muster.jobs.spec.job import Job
from muster.jobs.spec.site import Site
from muster.jobs.spec.train import TrainSettings
from muster.launch.plan.plan import Context
from muster.launch.supervision.console import Console
from muster.launch.supervision.inbox import Heard, NodeChannelClosed
from muster.launch.supervision.supervisor import Supervisor
from muster.launch.wire import messages as wire
from support.messages import exited, hello

DEADLINE_S = 20.0
TRAIN = {"model": "gpt-nano", "data": "synthetic", "mode": "flat", "exact": True, "virtual_ranks": 12, "batch_size": 24}


class PlayedAgent:
    """One agent, and its channel. `ranks`, `joiners`: the numbers of its ranks in its newest attempt."""

    def __init__(self, box: "PlayedNodes", slot: int) -> None:
        self.box, self.slot, self.node = box, slot, slot
        self.unhandled = asyncio.Semaphore(0)
        self.ranks: list[int] = []
        self.joiners: list[int] = []
        self.attempt = 0
        self.is_gone = False

    def say(self, message: wire.FromAgent) -> None:
        if not self.is_gone:
            self.box.supervisor.inbox.put(Heard(self.slot, message, self, time.time()))  # type: ignore[arg-type]

    def report(self, rank: int, what: str, **fields: Any) -> None:
        self.say(wire.Report(self.attempt, (rank,), {"report": what, **fields}))  # type: ignore[arg-type, misc]

    def post(self, message: wire.ToAgent) -> None:
        match message:
            case wire.Beat():
                self.say(wire.Heartbeat(self.attempt, message.sent, time.time(), time.time()))
            case wire.Prepare():
                self.say(wire.Prepared(message.attempt, 4242, message.bind, ()))
            case wire.Start():
                if message.attempt != self.attempt or not message.joins:
                    self.ranks, self.joiners = [], []
                self.attempt, new = message.attempt, [each["rank"] for each in message.ranks]
                (self.joiners if message.joins else self.ranks).extend(new)
                self.say(wire.Started(self.attempt, tuple((rank, 1000 + rank, 1) for rank in new), time.time()))
                if not message.joins:
                    self.work(new, message.ranks[0])
            case wire.StopRanks():
                for rank in (*self.ranks, *self.joiners) if message.attempt == self.attempt else ():
                    self.say(exited(rank, None, signal="SIGTERM", sent="SIGTERM", attempt=self.attempt))
                self.ranks, self.joiners = [], []
                self.say(wire.Swept(message.attempt, 0, ()))
            case wire.Hold() if 0 in self.ranks:
                self.say(wire.Held(self.attempt, self.box.steps))
            case wire.StopAt() if message.regroups:
                for rank in self.ranks:
                    self.report(rank, "waiting", of=self.attempt, step=message.steps, why="ranks join")

    def work(self, ranks: list[int], start: dict[str, Any]) -> None:
        """Join the others, and train, if the test lets the ranks of this attempt do so."""
        for rank in ranks:
            self.report(rank, "arrived")
            self.report(rank, "joined")
        if 0 in ranks and self.attempt not in self.box.stuck:
            world = int(start["env"]["WORLD_SIZE"])
            self.report(0, "replicas", groups=[[0, world, 1]], why="", reloads=False)
            self.box.steps += 1
            with self.box.run.metrics.open("a") as file:
                file.write(json.dumps({"step": self.box.steps, "attempt": self.attempt, "loss": 1.0}) + "\n")
            if self.attempt:
                self.report(0, "regrouped", step=self.box.steps - 1, redone=0, source=0, seconds=0.1)
            self.report(0, "first_step", step=self.box.steps)

    def abort(self) -> None:
        self.is_gone = True

    close = abort


class PlayedNodes:
    """The run. `script(self)` plays it; then the supervisor is told to end. `stuck`: attempts that do no step."""

    name = "local"
    patience_s = 0.0

    def __init__(self, folder: Path, *, stuck: tuple[int, ...] = (), **train: Any) -> None:
        self.run = RunDir(folder / "demo-20250101T000000.000Z-abc123")
        make_run(self.run)
        job = Job(
            name="demo",
            kind="train",
            nodes=4,
            checkpoint=CheckpointSettings(),
            restart=RestartSettings.model_validate({"max": 9, "backoff": 0.0, "in_place": "auto", "min_nodes": 1}),
            settings=TrainSettings.model_validate({**TRAIN, **train}),
        )
        placement = place(job, [Host(f"n{number}", "127.0.0.1") for number in range(4)])
        context = Context(job, Site(), placement, self.run, "/srv", "/opt/python", "m:f")
        self.stuck, self.steps = {*stuck}, 10
        self.supervisor = Supervisor(context, self, Console(quiet=True))  # type: ignore[arg-type]
        self.agents: list[PlayedAgent] = []

    def printed(self, slot: int) -> str:
        return ""

    async def start(self, gate: Any) -> None:
        self.agents = [PlayedAgent(self, slot) for slot in range(4)]
        for agent in self.agents:
            agent.say(hello(host=f"n{agent.slot}"))

    async def restart(self, slot: int, gate: Any) -> None:
        self.agents[slot] = PlayedAgent(self, slot)
        self.agents[slot].say(hello(host=f"n{slot}"))

    async def close(self, lost: Any) -> None:
        pass

    # What a script does ---------------------------------------------------------------------------------------------

    async def until(self, condition: Callable[[], Any], what: str) -> None:
        for _ in range(int(DEADLINE_S / 0.01)):
            if condition():
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"waited for {what}: {[*read_lines(self.run.events)]}")

    async def event(self, name: str, **fields: Any) -> dict[str, Any]:
        """Wait for an event with these fields."""
        await self.until(lambda: self.events(name, **fields), f"{name} {fields}")
        return self.events(name, **fields)[-1]

    def events(self, name: str, **fields: Any) -> list[dict[str, Any]]:
        rows = [row for row in read_lines(self.run.events) if row["event"] == name]
        return [row for row in rows if fields.items() <= row.items()]

    def lose(self, slot: int) -> None:
        """End an agent, and with it its ranks."""
        agent = self.agents[slot]
        self.supervisor.inbox.put(NodeChannelClosed(slot, via=agent))  # type: ignore[arg-type]
        agent.is_gone = True

    def ready(self, slot: int) -> None:
        """Say that the joiners of a node are ready."""
        agent = self.agents[slot]
        for rank in agent.joiners:
            agent.report(rank, "waiting", of=agent.attempt, step=0, why="ready to join")

    def kill(self, slot: int, rank: int) -> None:
        agent = self.agents[slot]
        (agent.ranks if rank in agent.ranks else agent.joiners).remove(rank)
        agent.say(exited(rank, None, signal="SIGKILL", attempt=agent.attempt, ended=time.time()))

    def play(self, script: Callable[["PlayedNodes"], Coroutine[Any, Any, None]]) -> list[dict[str, Any]]:
        """Run the script beside the supervisor; return the rows of the attempts."""

        async def both() -> None:
            running = asyncio.create_task(self.supervisor.run())
            await script(self)
            self.run.stop.write_text(json.dumps({"time": 1.0, "who": "the test", "now": True}))
            await asyncio.wait_for(running, DEADLINE_S)

        asyncio.run(both())
        return [*read_lines(self.run.attempts)]
