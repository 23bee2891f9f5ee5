"""Which checkpoint in memory is chosen, message by message, while the nodes fetch one and others become complete."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from muster.jobs.hosts.placement import NodePlacement
from muster.jobs.runfolder.rundir import RunDir
from muster.launch.records.eventlog import EventLog
from muster.launch.supervision.peer_memory import Chosen, PeerMemory
from muster.launch.supervision.run_nodes import RunNodes
from muster.launch.wire import messages as wire
from support.messages import Channel

SLOTS = (0, 1)
OLD, NEW, NEWEST = "step-00000003.a001", "step-00000006.a001", "step-00000009.a001"


class Memory:
    """Two nodes that keep copies of each other. Step 3 is complete, and each node has one shard of step 6."""

    def __init__(self, folder: Path) -> None:
        self.run = RunDir(folder / "run-1")
        self.run.path.mkdir()
        self.nodes = RunNodes([NodePlacement(slot, f"n{slot}", f"10.0.0.{slot}", slot, 1) for slot in SLOTS])
        for node in self.nodes.nodes:
            node.channel = Channel()  # type: ignore[assignment]
        job = SimpleNamespace(checkpoint=SimpleNamespace(memory_every_steps=3))
        context: Any = SimpleNamespace(job=job, site=SimpleNamespace(failure_domains=()))
        self.memory = PeerMemory(context, self.nodes, EventLog(self.run))
        self.memory._addresses = {0: "10.0.0.0", 1: "10.0.0.1"}
        for slot in SLOTS:
            self.memory.take(slot, wire.Keeping(1, 4000 + slot, ""), 1, SLOTS)
        self.complete(OLD)
        for slot in SLOTS:
            self.kept(slot, NEW, slot)

    def kept(self, slot: int, name: str, writer: int) -> None:
        self.memory.take(slot, wire.Kept(1, name, writer, 2, 10, f"{writer}" * 64), 1, SLOTS)

    def complete(self, name: str) -> None:
        for slot in SLOTS:
            for writer in SLOTS:
                self.kept(slot, name, writer)

    def fetched(self, name: str, why: str = "") -> None:
        for slot in SLOTS:
            self.memory.take(slot, wire.Fetched(2, name, "" if why else "a" * 64, why), 1, SLOTS)

    def orders(self, kind: type) -> list[Any]:
        channel: Any = self.nodes.nodes[0].channel
        return [each for each in channel.posted if isinstance(each, kind)]

    def load(self, *events: Callable[[], object], forgets: bool = False) -> Chosen | None:
        """Load, while these happen one after the other."""
        left = [*events]

        async def until(condition: Callable[[], bool]) -> bool:
            while not condition():
                left.pop(0)()
            return True

        found = asyncio.run(self.memory.load(until, -1, 2, SLOTS, 60.0, forgets=forgets))
        assert left == []
        return found


@pytest.fixture
def memory(tmp_path: Path) -> Memory:
    return Memory(tmp_path)


def test_one_that_becomes_complete_while_the_one_before_is_fetched_is_chosen(memory: Memory) -> None:
    chosen = memory.load(
        lambda: memory.fetched(NEW, "a shard is missing"),  # each shard was on one node
        lambda: memory.complete(NEWEST),
        lambda: memory.fetched(NEWEST),
    )
    assert [each.name for each in memory.orders(wire.Fetch)] == [NEW, OLD, NEWEST]
    assert chosen is not None
    assert (chosen["checkpoint"], memory.memory.complete) == (NEWEST, NEWEST)
    assert [(each.name, each.only) for each in memory.orders(wire.Complete)] == [(OLD, False), (NEWEST, True)]


def test_the_one_before_is_kept_until_another_one_is_there(memory: Memory) -> None:
    chosen = memory.load(
        lambda: memory.complete(NEW),  # it was being fetched already, with one node for each shard
        lambda: memory.fetched(NEW, "a shard is missing"),
        lambda: memory.fetched(OLD),
    )
    assert chosen is not None
    assert chosen["checkpoint"] == OLD
    memory.complete("step-00000012.a002")  # as before
    found = [(each.name, each.only) for each in memory.orders(wire.Complete)]
    assert found == [(OLD, False), (OLD, True), ("step-00000012.a002", False)]


def test_if_no_node_gets_any_all_are_kept_for_the_restart_which_forgets_them(memory: Memory) -> None:
    failing = [lambda name=name: memory.fetched(name, "n1: timed out") for name in (NEW, OLD)]
    for forgets, left in ((False, [NEW, OLD]), (True, [])):
        assert memory.load(*failing, forgets=forgets) is None
        assert [each.name for each in memory.memory.candidates(-1)] == left
