"""What follows an attempt that has ended: pure decisions, as tables."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.jobs.basics import exits
from muster.jobs.spec.failover import RestartSettings
from muster.launch.records.verdict import RankEnd, Stop, Verdict, judge
from muster.launch.supervision.progress import Hang
from muster.launch.supervision.recovery import Decision, NodeChoice, Past, blamed, choose, decide, in_vain, largest_part

ALWAYS = RestartSettings(max=100)


def past(
    *, code: int = 1, signal: str | None = None, node: int = 0, step: int = 10, committed: bool = True, **more: Any
) -> Past:
    """An attempt that ended because a rank of a node failed."""
    message = more.pop("message", "" if signal else f"ValueError: bad value at {step}")
    ending = RankEnd(0, node, f"n{node}", None if signal else code, signal, 1.0, "own", message, **more)
    return Past(judge([ending], None), node, step, committed)


def hung(seconds: float, place: str) -> Past:
    """A hang of rank 0 after step 7."""
    text = Hang(seconds, 30.0, "run", 7).text
    return past(code=exits.TIMEOUT, step=7, message=f"{text}: {place}", hung=True)


def stopped(code: int, message: str = "stopped") -> Past:
    return Past(judge([], Stop(code, message)), None, 10, False)


def program(line: str, code: int = 1) -> Past:
    """A program of the user's that failed, with its last line of output."""
    return past(code=code, ours=False, message="", last_lines=["first line", line])


def outage(**more: Any) -> Past:
    """An attempt of which two nodes did not reach the master."""
    return replace(
        stopped(exits.UNREACHABLE, "n2: cannot reach the master\nto continue without them: --exclude n2"), **more
    )


GROWN = replace(stopped(exits.REQUEUE), grown=True)
FINAL = (exits.USAGE, exits.BAD_JOB, exits.NO_CHECKPOINT, exits.RUN_FOLDER, exits.STORAGE, exits.REQUEUE, exits.REFUSED)
DONE = Past(Verdict(exits.DONE, "4 ranks ended with 0"), None, 100, committed=True)
BOOM = program("ValueError: boom")
LOST = "NotFiniteError: loss or gradients are not finite at step 7: lower train.optimizer.lr"


@pytest.mark.parametrize(
    ("pasts", "again"),
    [
        *(([stopped(code)], False) for code in (*FINAL, exits.DO_NOT_RESTART, exits.STOPPED)),
        *(([stopped(code)], True) for code in (exits.UNREACHABLE, exits.INFRASTRUCTURE, exits.TIMEOUT, 1, 137)),
        ([DONE], False),
        # A failure that names its own step is the same one when it was heard of later.
        ([past(step=7, message=LOST), past(step=9, message=LOST)], False),
        ([past(step=9, message=LOST), past(step=9, message=LOST.replace("7", "8"))], True),
        # Another step, another exception or a signal is not the same failure.
        ([past(step=7), past(step=8)], True),
        ([past(step=7), past(step=7, message="KeyError: 'x'")], True),
        ([past(signal="SIGKILL", step=7), past(signal="SIGKILL", step=7)], True),
        ([past(step=7), past(signal="SIGKILL", step=7)], True),
        ([past(step=7), outage(outage=True), past(step=7)], False),
        # Hangs at the same step and in the same place are the same failure, however long each was watched.
        ([hung(31.2, "rank 0 is in step"), hung(47.9, "rank 0 is in step")], False),
        ([hung(31.2, "rank 0 is in step"), hung(47.9, "rank 0 is in load")], True),
        # A program may mean anything by its codes, but those of a missing one.
        *(([past(code=code, ours=False, message="")], True) for code in (1, 66, 78)),
        *(([past(code=code, ours=False, message="")], False) for code in (126, 127)),
        ([BOOM, program("KeyError: 1"), BOOM], True),
        ([BOOM, program("ValueError: boom", code=3), BOOM], True),
        ([BOOM, past(signal="SIGKILL"), BOOM], True),
    ],
)
def test_what_a_restart_may_change_is_tried_again_and_the_rest_keeps_its_verdict(
    pasts: list[Past], again: bool
) -> None:
    decision = decide(pasts, ALWAYS, saves=True)
    assert decision.again is again
    if len(pasts) == 1:
        assert (decision.delay_s, decision.verdict) == (0.0, pasts[0].verdict)
    assert not decide(pasts, None, saves=True).again  # without restart: nothing is started again


def test_the_budget_counts_restarts_and_its_end_keeps_the_cause() -> None:
    twice = RestartSettings(max=2)
    killed = [past(signal="SIGKILL", step=step) for step in (5, 10, 15)]
    assert decide(killed[:1], twice, saves=True).again
    assert decide(killed[:2], twice, saves=True).again
    end = decide(killed, twice, saves=True)
    assert not end.again
    assert end.verdict.code == 137
    assert end.verdict.message.endswith("was killed by SIGKILL; 2 restarts used up (restart.max)")
    assert end.verdict.first == killed[-1].verdict.first


def test_the_same_exception_at_the_same_step_twice_is_the_programs_fault() -> None:
    decision = decide([past(step=7), past(step=7)], ALWAYS, saves=True)
    assert not decision.again
    assert decision.verdict.code == exits.DO_NOT_RESTART
    assert decision.verdict.message.startswith("the same failure at the same step (7) twice: rank 0 on node 0 (n0)")


def test_three_attempts_without_a_new_checkpoint_are_enough() -> None:
    vain = [past(signal="SIGKILL", step=step, committed=False) for step in (3, 4, 5)]
    assert decide(vain[:2], ALWAYS, saves=True).again
    decision = decide(vain, ALWAYS, saves=True)
    assert (decision.again, decision.verdict.code) == (False, exits.DO_NOT_RESTART)
    assert decision.verdict.message.startswith("3 attempts in a row without a new checkpoint: ")
    assert decide(vain, ALWAYS, saves=False).again  # who makes no checkpoints is not held to any


def test_a_new_checkpoint_resets_the_count_and_the_delay() -> None:
    tries = [past(signal="SIGKILL", step=step, committed=False) for step in (3, 4)]
    good = past(signal="SIGKILL", step=9)
    assert in_vain([*tries, good]) == 0
    assert decide([*tries, good], ALWAYS, saves=True).delay_s == 0.0
    assert in_vain([*tries, good, *tries]) == 2


def test_the_delay_doubles_from_the_second_failure_in_a_row_up_to_a_minute() -> None:
    tries = [past(signal="SIGKILL", step=step, committed=False) for step in range(12)]
    delays = [decide(tries[:count], ALWAYS, saves=False).delay_s for count in range(1, 12)]
    assert delays == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]


def test_a_node_is_blamed_after_two_of_three() -> None:
    assert blamed([past(node=1), past(node=2)]) == frozenset()
    assert blamed([past(node=1), past(node=2), past(node=1)]) == {1}
    assert blamed([past(node=1), past(node=1), past(node=0), past(node=2)]) == frozenset()
    assert blamed([stopped(124), stopped(124)]) == frozenset()


def test_ranks_that_are_lost_at_once_are_one_failure() -> None:
    first, second = past(node=0, signal="SIGKILL"), past(node=1, signal="SIGKILL")
    at_once = replace(second, unproven=True)  # began in place when the first rank was lost, and lost the second one
    assert blamed([first, at_once, second, replace(first, unproven=True)]) == frozenset()
    assert blamed([second, GROWN, at_once]) == {1}  # the rank that joined was lost


def chosen(
    before: list[int],
    alive: list[int],
    *,
    wanted: int = 4,
    least: int = 4,
    avoid: set[int] | None = None,
    revivable: list[int] | None = None,
    sizes: tuple[int, ...] = (1, 2, 3, 4, 5, 6),
) -> NodeChoice | None:
    return choose(
        before,
        alive,
        wanted=wanted,
        least=least,
        avoid=[frozenset(avoid or ())],
        revivable=revivable or [],
        fits=lambda slots: len(slots) in sizes,
    )


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        (chosen([0, 1, 2, 3], [0, 1, 2, 3]), NodeChoice((0, 1, 2, 3))),  # nobody is lost
        (chosen([0, 1, 2, 3], [0, 2, 3, 4]), NodeChoice((0, 2, 3, 4))),  # a spare replaces
        (chosen([0, 1, 2, 3], [0, 2, 3], least=2), NodeChoice((0, 2, 3))),  # fewer are better than waiting
        (chosen([0, 1, 2, 3], [0, 2, 3], least=2, sizes=(1, 2, 4)), NodeChoice((0, 2))),  # as many as the job can use
        (
            chosen([0, 1, 2, 3], [0, 2, 3], revivable=[1]),
            NodeChoice((0, 1, 2, 3), (1,)),
        ),  # too few: the lost one returns
        (chosen([0, 1, 2, 3], [0, 2, 3]), None),
        (chosen([0, 1, 2, 3], [0, 1, 2, 3], least=3, avoid={1}), NodeChoice((0, 2, 3))),  # a blamed one is left out
        (chosen([0, 1, 2, 3], [0, 1, 2, 3, 4], avoid={1}), NodeChoice((0, 2, 3, 4))),
        (chosen([0, 1, 2, 3], [0, 1, 2, 3], avoid={1}), NodeChoice((0, 2, 3, 1))),  # unless there is no other
        (chosen([0, 1], [0, 1, 2, 3], wanted=2, least=1), NodeChoice((0, 1))),
        (chosen([0, 1], [], wanted=2, least=1, revivable=[0, 1]), NodeChoice((0, 1), (0, 1))),
    ],
)
def test_the_nodes_of_the_next_attempt(what: NodeChoice | None, expected: NodeChoice | None) -> None:
    assert what == expected


@given(
    alive=st.sets(st.integers(0, 5)),
    avoid=st.sets(st.integers(0, 5)),
    revivable=st.sets(st.integers(0, 3)),
    least=st.integers(1, 4),
    sizes=st.sets(st.integers(1, 4)),
)
def test_a_choice_has_a_size_that_fits_no_node_twice_and_starts_just_the_lost(
    alive: set[int], avoid: set[int], revivable: set[int], least: int, sizes: set[int]
) -> None:
    lost = sorted(revivable - alive)
    choice = chosen([0, 1, 2, 3], sorted(alive), least=least, avoid=avoid, revivable=lost, sizes=tuple(sorted(sizes)))
    if choice is None:
        assert not sizes & set(range(least, 1 + min(4, len(alive))))
        return
    assert len(choice.slots) in sizes
    assert least <= len(choice.slots) <= 4
    assert len(set(choice.slots)) == len(choice.slots)
    assert set(choice.revive) == set(choice.slots) - alive
    assert set(choice.revive) <= set(lost)


def test_a_program_that_fails_three_times_with_the_same_last_word_is_not_tried_again() -> None:
    same = [program("ValueError: boom")] * 3
    assert decide(same[:2], ALWAYS, saves=False).again
    decision = decide(same, ALWAYS, saves=False)
    assert (decision.again, decision.verdict.code) == (False, exits.DO_NOT_RESTART)
    assert "the same failure 3 times in a row (code 1: ValueError: boom)" in decision.verdict.message


# Outages, and nodes that come back ------------------------------------------------------------------------------------


def test_an_outage_is_waited_out_longer_and_longer_and_never_ends_with_93() -> None:
    settings = RestartSettings(max=8)
    decisions = [decide([outage(outage=True)] * count, settings, saves=True) for count in range(1, 10)]
    assert [each.delay_s for each in decisions[:-1]] == [0.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    assert all(each.again for each in decisions[:-1])
    assert (decisions[-1].again, decisions[-1].verdict.code) == (False, exits.UNREACHABLE)
    said = "n2: cannot reach the master; 8 restarts used up (restart.max)\nto continue without them: --exclude n2"
    assert decisions[-1].verdict.message == said


def test_what_failed_before_an_outage_does_not_count_as_in_vain() -> None:
    hang = replace(stopped(exits.TIMEOUT, "the ranks made no progress"), committed=False)
    assert not decide([hang, hang, hang], ALWAYS, saves=True).again
    cut = outage(outage=True)
    assert decide([hang, cut, hang, cut, hang], ALWAYS, saves=True).again
    assert in_vain([hang, cut, hang]) == 1


def test_growing_is_no_restart_of_the_budget_and_no_failure() -> None:
    once = RestartSettings(max=1)
    killed = past(signal="SIGKILL", committed=False)
    assert decide([killed, GROWN], once, saves=True) == Decision(GROWN.verdict, again=True)
    assert not decide([killed, GROWN, GROWN, killed], once, saves=True).again
    assert decide([GROWN, GROWN, killed], once, saves=True).again
    assert in_vain([killed, GROWN, GROWN]) == 1
    assert blamed([past(node=1), GROWN, GROWN, past(node=1)]) == {1}


def cut(*pairs: tuple[int, int]) -> set[frozenset[int]]:
    return {frozenset(pair) for pair in pairs}


@pytest.mark.parametrize(
    ("slots", "cuts", "expected"),
    [
        ([0, 1, 2, 3], cut(), [0, 1, 2, 3]),
        ([0, 1, 2, 3], cut((0, 2), (0, 3), (1, 2), (1, 3)), [0, 1]),  # of two halves the one with the master
        ([0, 1, 2, 3], cut((0, 1), (0, 2), (0, 3)), [1, 2, 3]),  # the master itself is alone
        ([0, 1, 2, 3], cut((3, 0), (3, 1), (3, 2)), [0, 1, 2]),
        ([2, 3], cut((0, 2), (0, 3)), [2, 3]),
        ([], cut((0, 1)), []),
    ],
)
def test_the_largest_part_of_a_cut_network(slots: list[int], cuts: set[frozenset[int]], expected: list[int]) -> None:
    assert largest_part(slots, cuts) == expected


def in_groups(before: list[int], alive: list[int], blame: set[int], apart: set[int], least: int) -> NodeChoice | None:
    avoid = [frozenset(blame), frozenset(apart)]
    return choose(before, alive, wanted=4, least=least, avoid=avoid, revivable=[], fits=lambda _: True)


def test_nodes_that_are_cut_off_are_used_last() -> None:
    assert in_groups([0, 1, 2, 3], [0, 1, 2, 3], {1}, {2}, 2) == NodeChoice((0, 3))
    assert in_groups([0, 1, 2, 3], [0, 1, 2, 3], {1}, {2}, 3) == NodeChoice((0, 3, 1))
    assert in_groups([0, 1, 2, 3], [0, 1, 2, 3], {1}, {2}, 4) == NodeChoice((0, 3, 1, 2))


def test_a_node_that_was_lost_earlier_replaces_one_that_is_lost_now() -> None:
    assert chosen([0, 1], [0, 2], wanted=2, least=2, revivable=[1, 3]) == NodeChoice((0, 2))
    assert chosen([0], [0], wanted=2, least=2, revivable=[3]) == NodeChoice((0, 3), (3,))
