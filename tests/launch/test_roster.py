"""Who is late, as words: pure."""

from jobs.placement import NodePlacement, Placement
from launch.roster import Roster


def roster(*, meets: bool = True, answered: bool = True) -> Roster:
    nodes = tuple(NodePlacement(node, f"n{node}", "127.0.0.1", node * 2, 2) for node in range(2))
    made = Roster(Placement(nodes, 4, "127.0.0.1"), meets=meets)
    for number, node in enumerate(made.nodes):
        node.hello = {"host": f"n{number}"} if answered or number == 0 else {}
    return made


def test_nobody_is_late_when_all_have_joined() -> None:
    made = roster()
    made.arrived = made.joined = {0, 1, 2, 3}
    assert made.late(60.0, patient=False) == ""


def test_a_silent_agent_comes_before_its_ranks() -> None:
    assert roster(answered=False).late(60.0, patient=True) == (
        "node 1: the agent did not answer within 60 s (start_timeout_s)"
    )


def test_the_ranks_that_have_not_arrived_are_named_with_their_node() -> None:
    made = roster()
    made.arrived = {0, 1, 2}
    message = made.late(60.0, patient=True)
    assert message.startswith("rank 3 on node 1 (n1) did not reach the rendezvous within 60 s (start_timeout_s)")
    assert "muster logs --rank 3" in message


def test_ranks_that_arrived_but_did_not_join_are_given_a_moment_then_named() -> None:
    made = roster()
    made.arrived, made.joined = {0, 1, 2, 3}, {0, 1, 2}
    assert made.late(60.0, patient=True) == ""
    assert made.late(60.0, patient=False) == (
        "rank 3 on node 1 (n1) did not meet the others within 60 s (start_timeout_s)"
    )


def test_a_rank_that_has_ended_is_not_late() -> None:
    made = roster()
    made.arrived = made.joined = {0, 1, 2}
    made.running -= {3}
    assert made.late(60.0, patient=False) == ""


def test_programs_need_not_meet_but_once_one_waits_all_should_come() -> None:
    made = roster(meets=False)
    assert made.late(60.0, patient=False) == ""
    made.arrived = {0}
    assert "rank 1 on node 0, rank 2 on node 1, rank 3 on node 1" in made.late(60.0, patient=False)
