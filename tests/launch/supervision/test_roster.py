"""Who is late, as words, and how far clocks are apart: pure."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.jobs.hosts.placement import NodePlacement, Placement
from muster.launch.supervision.roster import Roster
from muster.launch.supervision.run_nodes import ClockOffset, NodeState
from support.messages import hello


def roster(*, meets: bool = True, answered: bool = True, nodes: int = 2) -> Roster:
    placed = tuple(NodePlacement(node, f"n{node}", "127.0.0.1", node * 2, 2) for node in range(nodes))
    made = Roster(Placement(placed, 2 * nodes, "127.0.0.1"), [NodeState(each) for each in placed], meets=meets)
    for number, node in enumerate(made.nodes):
        node.hello = hello(host=f"n{number}") if answered or number == 0 else None
    return made


ALL = {0, 1, 2, 3}
WITHIN = "within 60 s (start_timeout_s)"


@pytest.mark.parametrize(
    ("made", "arrived", "joined", "patient", "late"),
    [
        (roster(), ALL, ALL, False, ""),
        # A silent agent comes before its ranks; of many, four are named.
        (roster(answered=False), set(), set(), True, f"node 1 (n1): the agent did not answer {WITHIN}"),
        (
            roster(answered=False, nodes=8),
            set(),
            set(),
            True,
            f"node 1 (n1), 2 (n2), 3 (n3), 4 (n4) and 3 more: the agent did not answer {WITHIN}",
        ),
        (roster(), {0, 1, 2}, set(), True, f"rank 3 on node 1 (n1) did not reach the rendezvous {WITHIN}"),
        (roster(), ALL, {0, 1, 2}, True, ""),  # those that have arrived are given a moment to join
        (roster(), ALL, {0, 1, 2}, False, f"rank 3 on node 1 (n1) did not join the others {WITHIN}"),
        (roster(meets=False), set(), set(), False, ""),
        (roster(meets=False), {0}, set(), False, ""),  # programs have another limit
    ],
)
def test_who_is_late(made: Roster, arrived: set[int], joined: set[int], patient: bool, late: str) -> None:
    made.arrived, made.joined = arrived, joined
    message = made.late(60.0, patient=patient)
    assert message.startswith(late) if late else message == ""


def test_a_rank_that_has_ended_is_not_late() -> None:
    made = roster()
    made.arrived = made.joined = {0, 1, 2}
    made.running -= {3}
    assert made.late(60.0, patient=False) == ""


def test_the_ranks_of_a_program_have_time_from_the_first_arrival_and_each_minute_a_line() -> None:
    made, said = roster(meets=False), list[str]()
    assert made.absent(1e6, 150.0, said.append) == ""  # programs need not meet
    made.arrived = {0}
    ranks = "rank 1 on node 0, rank 2 on node 1, rank 3 on node 1 (n0)"
    for now in range(150):
        assert made.absent(2e6 + now, 150.0, said.append) == ""
        if now == 100:
            made.arrived.add(1)
    first, second = said
    assert re.fullmatch(r"waiting until \d\d:\d\d:\d\d for (.*) at the rendezvous", first).group(1) == ranks
    assert "for rank 2 on node 1, rank 3 on node 1 (n1) at" in second
    late = "rank 2 on node 1, rank 3 on node 1 (n1) did not reach the rendezvous within 150 s after the first rank"
    assert made.absent(2e6 + 150, 150.0, said.append) == f"{late} (rendezvous_timeout_s)"
    made.running -= {0, 1}  # nobody waits
    assert made.absent(2e6 + 151, 150.0, said.append) == ""
    made = roster(meets=True)
    made.arrived = {0}
    assert [made.absent(now, 150.0, said.append) for now in (0.0, 1e9)] == ["", ""]


# Clocks ---------------------------------------------------------------------------------------------------------------

Seconds = st.floats(0.0, 10.0)


@given(
    ahead_s=st.floats(-1e6, 1e6),
    travels=st.lists(st.tuples(Seconds, Seconds, Seconds), min_size=1, max_size=8),
)
def test_a_clock_is_told_to_within_half_of_the_fastest_exchange(ahead_s: float, travels) -> None:
    clock = ClockOffset()
    now = 1e9
    for there_s, answering_s, back_s in travels:
        heard = now + there_s + ahead_s
        received = now + there_s + answering_s + back_s
        clock.note(sent=now, heard=heard, answered=heard + answering_s, received=received)
        now = received + 1.0
    fastest_s = min(there_s + back_s for there_s, _, back_s in travels)
    assert clock.travel_s == pytest.approx(fastest_s, abs=1e-3)
    assert abs(clock.seconds - ahead_s) <= fastest_s / 2 + 1e-3


def test_an_exchange_that_took_longer_changes_nothing() -> None:
    clock = ClockOffset()
    clock.note(sent=100.0, heard=160.1, answered=160.1, received=100.2)
    assert (clock.seconds, clock.travel_s) == (pytest.approx(60.0), pytest.approx(0.2))
    clock.note(sent=200.0, heard=265.0, answered=265.0, received=205.0)  # all of it on the way there
    assert clock.seconds == pytest.approx(60.0)


def test_a_clock_that_is_set_is_followed_although_a_later_exchange_takes_longer() -> None:
    clock = ClockOffset()
    clock.note(sent=100.0, heard=100.1, answered=100.1, received=100.2)
    clock.note(sent=200.0, heard=3800.5, answered=3800.5, received=201.0)
    assert (clock.seconds, clock.travel_s) == (pytest.approx(3600.0), pytest.approx(1.0))


@pytest.mark.parametrize("answered", [50.0, 1e9])
def test_an_exchange_during_which_a_clock_was_set_is_ignored(answered: float) -> None:
    """Its travel time is negative, so no other exchange would be shorter."""
    clock = ClockOffset()
    clock.note(sent=100.0, heard=100.1, answered=100.1, received=100.2)
    clock.note(sent=200.0, heard=200.1, answered=max(answered, 0.0), received=200.2)
    assert clock.seconds == pytest.approx(0.0)


def test_before_any_exchange_clocks_are_taken_to_agree() -> None:
    assert ClockOffset().seconds == 0.0
