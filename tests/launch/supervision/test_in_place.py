"""Whether ranks continue in place, and under which numbers: pure."""

from typing import Any

import pytest

from muster.jobs.hosts.placement import NodePlacement, Placement
from muster.jobs.spec.failover import RestartSettings
from muster.jobs.spec.modes import Parallel
from muster.launch.records.verdict import RankEnd
from muster.launch.supervision.in_place import Regrouping, Spread, missing, of_whole_copies, regroup, why_not

AUTO = RestartSettings(in_place="auto")
KILLED = RankEnd(1, 0, "n0", None, "SIGKILL", 1.0, "own")
SHARDED = Spread((), "no rank has a copy", reloads=True)
LOST = RankEnd(None, 1, "n1", 69, None, 1.0, "own", "its agent was silent for 5 s")


def node(number: int, first: int, ranks: int) -> NodePlacement:
    return NodePlacement(number, f"n{number}", f"10.0.0.{number}", first, ranks)


TWO = Placement((node(0, 0, 2), node(1, 2, 2)), 4, "10.0.0.0")


def regrouped(*living: int, joiners: dict[int, int] | None = None) -> Regrouping:
    return regroup(TWO, (5, 7), living, joiners or {}, lambda slot: node({5: 0, 7: 1, 9: 2}[slot], 0, 2))


def reason(regrouping: Regrouping, ending: RankEnd = KILLED, **more: Any) -> str:
    facts: dict[str, Any] = {
        "memory": "checkpoint.memory_every_steps is not set",
        "used": 0,
        "tries": 0,
        "nodes": 2,
        "least": 2,
        "misfit": lambda world_size: "",
        **more,
    }
    spread, settings = facts.pop("spread", Spread([range(4)])), facts.pop("settings", AUTO)
    return why_not(ending, regrouping, spread, settings, **facts)


def test_living_ranks_keep_their_order_and_their_nodes() -> None:
    found = regrouped(0, 2, 3)
    assert (found.slots, found.world_size, dict(found.adopted)) == ((5, 7), 3, {0: 0, 1: 2, 2: 3})
    assert [(each.host, each.node_rank, each.first_rank, each.ranks) for each in found.nodes] == [
        ("n0", 0, 0, 1),
        ("n1", 1, 1, 2),
    ]


def test_a_node_without_a_living_rank_is_left_out() -> None:
    found = regrouped(2, 3)
    assert (found.slots, dict(found.adopted)) == ((7,), {0: 2, 1: 3})
    assert found.nodes == (NodePlacement(0, "n1", "10.0.0.1", 0, 2),)


def test_joiners_follow_the_ranks_of_their_node_and_their_own_nodes_come_last() -> None:
    found = regrouped(2, 3, joiners={4: 5, 5: 5, 6: 9})
    assert (found.slots, dict(found.adopted)) == ((7, 5, 9), {0: 2, 1: 3, 2: 4, 3: 5, 4: 6})
    assert dict(regrouped(0, 2, 3, joiners={4: 5}).adopted) == {0: 0, 1: 4, 2: 2, 3: 3}


SPLIT = Parallel(data=2, pipe=2)


@pytest.mark.parametrize(
    ("split", "living", "members"),
    [
        (SPLIT, {0, 2, 3}, {0, 2}),
        (SPLIT, {0, 1, 3}, {1, 3}),  # the copy of rank 0 has lost rank 2, and may lose rank 0 next
        (SPLIT, {1, 2}, {1, 2}),  # stages of different copies
        (SPLIT, {0, 1}, set()),  # no stage 1
        (Parallel(data=3, pipe=2), {0, 2, 3, 4, 5}, {0, 2, 3, 5}),
        (Parallel(data=2, pipe=2, tensor=2), {0, 1, 3, 4, 5, 6, 7}, {0, 1, 4, 5}),
        (Parallel(data=2, pipe=1, tensor=2), {0, 3}, set()),  # no complete copy of the layers
        (Parallel(data=4), {1, 3}, {1, 3}),
    ],
)
def test_the_ranks_of_a_split_model_that_form_whole_copies(split: Parallel, living: set, members: set) -> None:
    assert of_whole_copies(living, split) == members


def test_a_rank_keeps_its_stage_and_the_rest_of_its_copy_ends() -> None:
    found = regroup(TWO, (5, 7), (0, 2, 3), {}, lambda slot: node(0, 0, 2), SPLIT)
    assert (found.slots, dict(found.adopted)) == ((5, 7), {0: 0, 1: 2})


def test_joiners_take_the_places_of_their_stage() -> None:
    one, left = Placement((node(0, 0, 2),), 2, "10.0.0.0"), Parallel(data=1, pipe=2)
    found = regroup(one, (5,), (0, 1), {2: 5, 3: 5}, lambda slot: node(0, 0, 4), left)
    assert dict(found.adopted) == {0: 0, 1: 2, 2: 1, 3: 3}
    two = Placement((node(0, 0, 1), node(1, 1, 1)), 2, "10.0.0.0")
    found = regroup(two, (5, 7), (0, 1), {2: 8, 3: 9}, lambda slot: node(0, 0, 1), left)
    assert (found.slots, dict(found.adopted)) == ((5, 8, 7, 9), {0: 0, 1: 2, 2: 1, 3: 3})


def test_ranks_cannot_join_if_a_rank_would_get_another_stage() -> None:
    one, left = Placement((node(0, 0, 2),), 2, "10.0.0.0"), Parallel(data=1, pipe=2)
    found = regroup(one, (5,), (0, 1), {2: 8, 3: 8}, lambda slot: node(0, 0, 2), left)  # both stages are on one node
    assert (found.world_size, dict(found.adopted)) == (0, {})


def test_groups_of_equal_state_get_the_new_numbers() -> None:
    assert regrouped(0, 3).groups([range(4), {0}, {1, 3}]) == [{0, 1}, {0}, {1}]


def test_missing_ranks_are_those_of_their_own_nodes_and_of_idle_ones() -> None:
    small = Placement((node(0, 0, 1), node(1, 1, 2)), 3, "10.0.0.0")
    assert missing(small, (5, 7), [9], lambda slot: 2) == [5, 9, 9]
    assert missing(TWO, (5, 7), [], lambda slot: 2) == []


def test_the_others_continue_after_a_killed_rank_and_after_a_lost_node() -> None:
    assert reason(regrouped(0, 2, 3)) == ""
    assert reason(regrouped(0, 1), LOST, nodes=1, least=1) == ""


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"settings": None}, "restart.in_place is not set"),
        ({"settings": RestartSettings()}, "restart.in_place is not set"),
        ({"used": 5}, "restart.max is used up"),
        ({"tries": 2}, "2 attempts in a row began in place and completed no step"),
        ({"spread": Spread((), "no rank has a copy")}, "no rank has a copy"),
        ({"spread": SHARDED}, "no rank has a copy, and checkpoint.memory_every_steps is not set"),
        ({"spread": SHARDED, "memory": ""}, ""),
        ({"spread": Spread()}, "the ranks have not begun to train"),
        ({"spread": Spread([range(4), {1}])}, "no living rank has the state of rank 1"),
        ({"spread": Spread([range(4), {1}], reloads=True), "memory": ""}, ""),
        ({"nodes": 1}, "1 node left, and the job needs 2 (restart.min_nodes)"),
        ({"misfit": lambda world_size: f"not on {world_size}"}, "not on 3"),
        ({"ending": RankEnd(1, 0, "n0", 1, None, 1.0, "own")}, "the failure may be one of the program"),
        ({"ending": RankEnd(1, 0, "n0", None, "SIGTERM", 1.0, "own")}, "the failure may be one of the program"),
        ({"ending": RankEnd(1, 0, "n0", None, "SIGABRT", 1.0, "own")}, "the failure may be one of the program"),
        ({"ending": RankEnd(1, 0, "n0", None, None, 1.0, "own", hung=True)}, "the failure may be one of the program"),
        ({"ending": RankEnd(1, 0, "n0", 1, None, 1.0, "peer")}, "the failure may be one of the program"),
    ],
)
def test_the_reasons_to_restart_all_ranks(more: dict[str, Any], why: str) -> None:
    assert reason(regrouped(0, 2, 3), **more) == why
