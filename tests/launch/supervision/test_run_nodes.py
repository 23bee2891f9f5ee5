"""When an agent that is not heard is lost, and when it, its supervisor or all of them only lack a processor."""

from collections.abc import Iterable

import pytest

from muster.jobs.hosts.placement import NodePlacement
from muster.launch.supervision.run_nodes import SILENT_S, TICK_S, TOGETHER_S, RunNodes
from muster.launch.wire.messages import Heartbeat
from support.messages import Channel, hello

BEGAN = 1000.0


class Clock:
    """Nodes of a run that have all greeted, at a time that the test moves on tick by tick."""

    def __init__(self, nodes: int) -> None:
        self.now = BEGAN
        self.run_nodes = RunNodes([NodePlacement(number, f"n{number}", "", number, 1) for number in range(nodes)])
        self.run_nodes.missing.clear()
        for number, node in enumerate(self.run_nodes.nodes):
            node.channel, node.hello = Channel(), hello(host=f"n{number}")  # type: ignore[assignment]
            self.hear(number)
        self.run_nodes.tick(self.now)

    def hear(self, number: int, late_s: float = 0.0) -> None:
        """Have a node answer a beat."""
        self.run_nodes.nodes[number].heard = self.now
        self.run_nodes.nodes[number].beat(Heartbeat(0, 1.0, 1.0, 1.0, late_s=late_s), 1.0, 0)

    def until_lost(self, heard: Iterable[int] = (), tick_s: float = TICK_S, limit_s: float = 60.0) -> dict[int, float]:
        """Tick until nodes are lost, or for `limit_s`; return when each was. Those of `heard` answer every beat."""
        began = self.now
        while self.now - began < limit_s:
            self.now += tick_s
            self.run_nodes.tick(self.now)
            for number in heard:
                self.hear(number)
            if found := self.run_nodes.silent(self.now):
                return dict.fromkeys(found, self.now - began)
        return {}


def test_one_silent_node_among_others_is_lost_after_five_seconds() -> None:
    assert Clock(4).until_lost(heard=(0, 2, 3)) == {1: SILENT_S + TICK_S}


def test_the_only_node_is_lost_after_five_seconds() -> None:
    assert Clock(1).until_lost() == {0: SILENT_S + TICK_S}


def test_when_all_fall_silent_at_once_it_waits_as_long_again() -> None:
    lost = SILENT_S + TOGETHER_S + TICK_S
    assert Clock(3).until_lost() == {0: lost, 1: lost, 2: lost}


def test_nodes_that_return_together_are_not_lost_one_after_the_other() -> None:
    made = Clock(3)
    assert made.until_lost(limit_s=9.0) == {}
    made.hear(0)
    assert made.until_lost(heard=(0,), limit_s=1.0) == {}
    assert set(made.until_lost(heard=(0,), limit_s=SILENT_S)) == {1, 2}


@pytest.mark.parametrize("tick_s", [0.5, 2.4, 30.0])
def test_time_in_which_the_supervisor_did_not_run_is_no_silence(tick_s: float) -> None:
    ticks = SILENT_S / TICK_S
    assert Clock(2).until_lost(heard=(0,), tick_s=tick_s, limit_s=ticks * tick_s) == {}
    assert set(Clock(2).until_lost(heard=(0,), tick_s=tick_s, limit_s=(ticks + 2) * tick_s)) == {1}


@pytest.mark.parametrize(("late_s", "allowed_s"), [(0.0, 5.0), (2.0, 7.0), (1e12, 10.0)])
def test_an_agent_that_says_that_it_is_late_is_allowed_as_much_more(late_s: float, allowed_s: float) -> None:
    made = Clock(2)
    made.hear(1, late_s)
    assert made.until_lost(heard=(0,)) == {1: allowed_s + TICK_S}


def test_an_agent_that_has_never_answered_a_beat_may_still_be_starting() -> None:
    made = Clock(2)
    made.run_nodes.nodes[1].forget_agent()
    made.run_nodes.greeted(1, hello(host="n1"), Channel())
    made.run_nodes.nodes[1].heard = made.now
    assert made.until_lost(heard=(0,)) == {1: 2 * SILENT_S + TICK_S}


def test_in_a_large_run_each_beat_asks_other_nodes_for_their_ranks_and_the_known_progress_stays() -> None:
    places = [NodePlacement(number, f"n{number}", "", number * 1024, 1024) for number in range(10)]
    run_nodes, asked = RunNodes(places), list[list[int]]()
    run_nodes.missing.clear()
    for node in run_nodes.nodes:
        node.channel, node.hello = Channel(), hello()  # type: ignore[assignment]
    for second in range(5):
        run_nodes.tick(BEGAN + 2 * second)
        beats = [node.channel.posted[-1] for node in run_nodes.nodes if node.channel is not None]  # type: ignore[attr-defined]
        asked.append([number for number, beat in enumerate(beats) if beat.ranks])
    assert asked == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 8, 9], [2, 3, 4, 5], [6, 7, 8, 9]]
    node, of_rank = run_nodes.nodes[0], {"phase": "run", "steps": 3, "beats_age_s": 0.1, "state": ""}
    told = {"steps": 3, "phases": ("run",), "beats_age_s": 0.1, "slowest_s": 0.1, "sessions": 1, "output_age_s": None}
    for ranks in ({"0": of_rank}, {}):
        node.beat(Heartbeat(0, 1.0, 1.0, 1.0, {**told, "ranks": ranks}), 1.0, 0)  # type: ignore[typeddict-item]
        assert node.progress is not None
        assert node.progress["ranks"] == {"0": of_rank}
    assert node.ranks_at < node.progress_at
    node.beat(Heartbeat(0, 1.0, 1.0, 1.0, {**told, "phases": (), "ranks": {}}), 1.0, 0)  # type: ignore[typeddict-item]
    assert node.progress["ranks"] == {}  # all have ended


def test_the_beats_of_a_second_are_spread_over_its_ticks_and_each_node_gets_one() -> None:
    made = Clock(8)  # its first tick sends a beat to every node
    channels = [node.channel for node in made.run_nodes.nodes]
    counts = []
    for _ in range(8):
        made.now += TICK_S
        made.run_nodes.tick(made.now)
        counts.append([len(each.posted) - 1 for each in channels])  # type: ignore[union-attr, attr-defined]
    assert [sum(each) for each in counts] == [2, 4, 6, 8, 10, 12, 14, 16]
    assert counts[3] == [1] * 8
    assert counts[7] == [2] * 8


def test_more_nodes_than_the_supervisor_can_beat_in_a_second_get_beats_less_often() -> None:
    assert RunNodes([NodePlacement(number, "n", "", number, 1) for number in range(10_000)]).beat_s == 2.0
    assert RunNodes([NodePlacement(number, "n", "", number, 1) for number in range(1000)]).beat_s == 1.0
