"""Nodes that an attempt does not use: when they are tried again, and when the run grows by them."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from muster.jobs.basics.errors import MusterError, RefusedError, UnreachableError
from muster.jobs.hosts.placement import NodePlacement
from muster.jobs.runfolder.rundir import RunDir
from muster.launch.supervision.inbox import Inbox
from muster.launch.supervision.reserve import FENCE_S, ORPHANS_S, REVIVE_S, SETTLE_S, Reserve
from muster.launch.supervision.run_nodes import RunNodes
from muster.launch.wire.messages import Reach, Reached
from support.messages import Channel

LOST = 3
USED = (0, 1)


class Starts:
    """Counts the starts of agents."""

    def __init__(self) -> None:
        self.slots: list[int] = []

    async def restart(self, slot: int, gate: object) -> None:
        self.slots.append(slot)


@pytest.fixture
def played(tmp_path: Path) -> SimpleNamespace:
    """Four nodes; an attempt on two of them, which `wrong` keeps others from joining."""
    run_nodes, starts = RunNodes([NodePlacement(f"n{n}", f"10.0.0.{n}", n, n, 1) for n in range(4)]), Starts()
    run_nodes.missing.clear()
    for node in run_nodes.nodes:
        node.channel = Channel()  # type: ignore[assignment]
    told = SimpleNamespace(wrong=None, warnings=[])
    startup = SimpleNamespace(
        begun=True,
        reach=lambda: Reach(0, "10.0.0.0", 29500, "", "/runs/run-1", "nonce"),
        judge=lambda node: told.wrong,
        warn=lambda text: told.warnings.append(text),
        context=SimpleNamespace(options={"saving": True}),
    )
    context = SimpleNamespace(run=RunDir(tmp_path))
    attempt = SimpleNamespace(startup=startup, is_stopping=False, context=context)
    reserve = Reserve(run_nodes, starts, Inbox(), remote=True)  # type: ignore[arg-type]
    return SimpleNamespace(run_nodes=run_nodes, starts=starts, reserve=reserve, attempt=attempt, told=told)


def tried(played: Any, now: float) -> bool:
    """Tick; say whether the agent of the lost node was started, whose start then fails."""

    async def work() -> int:
        before = len(played.starts.slots)
        played.reserve.tick(now, played.attempt, USED)
        await asyncio.sleep(0)
        return len(played.starts.slots) - before

    begun = asyncio.run(work())
    if begun:
        assert played.reserve.failed(LOST, UnreachableError("no route"), now)
    return bool(begun)


def gaps(played: Any, count: int, begin: float) -> list[float]:
    """The seconds between tries."""
    found, now, last = [], begin, begin
    while len(found) < count:
        if tried(played, now):
            found.append(now - last)
            last = now
        now += 0.5
    return found


def lose(played: Any, now: float, *, silent: bool = False) -> None:
    played.run_nodes.nodes[LOST].channel = Channel()
    played.run_nodes.lose(LOST, now, silent=silent)


def test_a_lost_node_is_tried_later_and_later_up_to_16_s(played: Any) -> None:
    lose(played, 100.0)
    assert gaps(played, 6, 100.0) == [ORPHANS_S, 4.0, 8.0, 16.0, 16.0, 16.0]


def test_the_ranks_of_a_silent_node_must_have_ended_first(played: Any) -> None:
    lose(played, 100.0, silent=True)
    late_s = played.run_nodes.nodes[1].late_s
    assert gaps(played, 2, 100.0) == [FENCE_S + late_s, 4.0]


def test_a_node_that_is_lost_again_and_again_is_left_alone_for_longer_each_time(played: Any) -> None:
    first = []
    for loss in range(7):
        lose(played, 1000.0 * loss)
        first += gaps(played, 1, 1000.0 * loss)
    assert first == [2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0]


def test_a_node_that_the_run_waits_for_is_tried_every_two_seconds(played: Any) -> None:
    for loss in range(5):
        lose(played, 100.0 + loss)
    played.reserve.needed = True
    assert gaps(played, 4, 104.0) == [ORPHANS_S, REVIVE_S, REVIVE_S, REVIVE_S]


def test_one_that_refuses_is_not_tried_again(played: Any) -> None:
    lose(played, 100.0)
    played.reserve.starting.add(LOST)
    assert played.reserve.failed(LOST, RefusedError("submitit starts it once"), 101.0)
    assert not any(tried(played, 101.0 + wait) for wait in range(100))


def answer(played: Any, slot: int, now: float, why: str = "", wrong: MusterError | None = None) -> None:
    played.told.wrong = wrong
    message = Reached(0, "eth1", "10.0.0.9", why, "code", "shared", "/runs", "")
    played.reserve.reached(slot, message, played.attempt, USED, now)


def test_an_idle_node_that_reaches_the_master_is_fit_and_one_that_does_not_is_cut_off(played: Any) -> None:
    assert not tried(played, 100.0)
    for slot in (2, 3):
        assert isinstance(played.run_nodes.nodes[slot].channel.posted[-1], Reach)
    answer(played, 2, 100.0)
    answer(played, 3, 100.0, wrong=UnreachableError("n3: cannot reach the master"))
    assert played.reserve.ready(101.0, wanted=2) == []
    assert played.reserve.ready(100.0 + SETTLE_S, wanted=2) == [2]
    assert played.run_nodes.cuts == {frozenset((3, each)) for each in USED}
    asked = len(played.run_nodes.nodes[3].channel.posted)
    tried(played, 101.0)
    assert len(played.run_nodes.nodes[3].channel.posted) == asked, "not so soon"
    played.run_nodes.nodes[3].tried = 0.0
    tried(played, 102.0)
    answer(played, 3, 102.0)
    assert played.reserve.ready(102.0, wanted=2) == [2, 3]
    assert played.run_nodes.cuts == set()


def test_a_warning_says_once_why_an_idle_node_is_refused_and_again_after_it_was_fit(played: Any) -> None:
    wrong = RefusedError("n2: its clock is off by +3600 s; set it (chronyc makestep)")
    for refused in (wrong, wrong, None, wrong):
        played.reserve.turn()
        played.run_nodes.nodes[2].tried = 0.0
        tried(played, 100.0)
        answer(played, 2, 100.0, wrong=refused)
        assert (2 in played.reserve.fit) == (refused is None)
    assert played.told.warnings == [f"{wrong}; the run does not use this node until then"] * 2


def test_what_nobody_asked_for_is_not_believed(played: Any) -> None:
    answer(played, 2, 100.0)
    assert played.reserve.fit == {}
