"""Ranks that join others, message by message: what a second loss does while they are being started."""

import asyncio
import time
from itertools import pairwise
from pathlib import Path

import pytest

from muster.launch.supervision import inbox, reserve
from support.messages import exited
from support.played_nodes import PlayedNodes


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("REVIVE_S", "ORPHANS_S", "SETTLE_S"):
        monkeypatch.setattr(reserve, name, 0.0)
    monkeypatch.setattr(inbox, "TICK_S", 0.02)


def sizes(rows: list[dict]) -> list[int]:
    return [row["world_size"] for row in rows]


def slots_of(box: PlayedNodes, attempt: int) -> dict[int, int]:
    """Return {joiner: slot} of the newest joiners."""
    return {rank: agent.slot for agent in box.agents if agent.attempt == attempt for rank in agent.joiners}


async def two_join(box: PlayedNodes) -> dict[int, int]:
    """Lose two nodes; return {joiner: slot} of those that are being started in their place."""
    await box.event("first_step", attempt=0)
    box.lose(1)
    box.lose(3)
    number = (await box.event("joining", joiners=[2, 3]))["attempt"]
    return slots_of(box, number)


@pytest.mark.parametrize("how", ["its node", "it alone", "late", "before the other is ready"])
def test_a_joiner_joins_without_the_one_that_was_lost(tmp_path: Path, how: str) -> None:
    async def script(box: PlayedNodes) -> None:
        slots = await two_join(box)
        if how != "before the other is ready":
            box.ready(slots[2])
        if how == "late":
            box.supervisor._current.joiners.deadline = time.monotonic()
        elif how == "it alone":
            box.kill(slots[3], 3)
        else:
            box.lose(slots[3])
        why = (await box.event("not_joined", rank=3))["why"]
        assert ("not ready within 60 s" in why) == (how == "late")
        box.ready(slots[2])
        (joining,) = (await box.event("joining", attempt=3))["joiners"]
        box.ready(slots_of(box, 3)[joining])
        await box.event("first_step", attempt=4)

    box = PlayedNodes(tmp_path)
    assert sizes(box.play(script)) == [4, 3, 2, 3, 4]
    assert box.events("stopping", attempt=2) == []


def test_a_joiner_waits_for_another_if_the_job_cannot_run_with_one(tmp_path: Path) -> None:
    async def script(box: PlayedNodes) -> None:
        slots = await two_join(box)
        box.ready(slots[2])
        box.kill(slots[3], 3)
        number = (await box.event("joining", joiners=[2, 4]))["attempt"]
        box.ready(slots_of(box, number)[4])
        await box.event("attempt", attempt=number + 1, world_size=4)

    assert 3 not in sizes(PlayedNodes(tmp_path, virtual_ranks=4).play(script))


@pytest.mark.parametrize("what", ["waiting", "joined", "replicas", "exited"])
def test_a_late_message_of_a_joiner_that_was_given_up_changes_nothing(tmp_path: Path, what: str) -> None:
    async def script(box: PlayedNodes) -> None:
        await box.event("first_step", attempt=0)
        box.lose(3)
        await box.event("joining", attempt=1, joiners=[3])
        agent, attempt = box.agents[3], box.supervisor._current
        spread = attempt.spread
        box.kill(3, 3)
        await box.event("joining", attempt=1, joiners=[4])
        if what == "exited":
            agent.say(exited(3, 1, attempt=1))
        else:
            more = {"waiting": {"of": 1, "step": 0, "why": ""}, "replicas": {"groups": [], "why": "", "reloads": False}}
            agent.report(3, what, **more.get(what, {}))
        box.ready(3)
        await box.event("first_step", attempt=2)
        assert attempt.spread == spread

    box = PlayedNodes(tmp_path)
    assert sizes(box.play(script)) == [4, 3, 4]
    assert box.events("exited", attempt=1) == []


@pytest.mark.parametrize("moment", ["starting", "ready", "joined"])
@pytest.mark.parametrize("of", ["a rank", "a node", "the node of the joiner"])
def test_a_rank_is_lost_while_others_join(tmp_path: Path, moment: str, of: str) -> None:
    async def script(box: PlayedNodes) -> None:
        slots = await two_join(box)
        trains = next(agent.slot for agent in box.agents if 1 in agent.ranks)
        if moment != "starting":
            box.ready(slots[2])
            box.ready(slots[3])
        if moment == "joined":
            await box.event("joined", attempt=3)
        if of == "a rank":
            box.kill(trains, box.agents[trains].ranks[0])
        else:
            box.lose(slots[3] if "joiner" in of else trains)
        while not [row for row in box.events("attempt", world_size=4) if row["attempt"] > (3 if box.stuck else 2)]:
            for agent in box.agents:
                box.ready(agent.slot)
            await asyncio.sleep(0.01)
        await box.event("first_step", attempt=box.supervisor.context.attempt)

    box = PlayedNodes(tmp_path, stuck=(3,) if moment == "joined" else ())
    rows = box.play(script)
    assert box.events("not_in_place") == box.events("warning") == []
    assert sum(row["lost_steps"] for row in rows[:-1]) == 0
    for before, row in pairwise(rows[:-1]):
        assert row["from_step"] == before["last_step"], rows
