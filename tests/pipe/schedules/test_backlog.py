"""Bounds on messages in transit, compared with simulated runs in which ranks proceed in any order."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.pipe.run import row_of
from muster.pipe.schedules.backlog import backlogs
from muster.pipe.schedules.messages import with_messages
from muster.pipe.schedules.programs import Receive, Send
from muster.pipe.schedules.tables import schedule

DRAWN = [
    # messages a rank can send before it must hear from the other: all for gpipe, the warm-up forwards for 1f1b
    ("gpipe", 2, 4, {(0, 1): 4, (1, 0): 4}),
    ("1f1b", 2, 4, {(0, 1): 2, (1, 0): 2}),
    ("1f1b", 3, 6, {(0, 1): 3, (1, 2): 2, (1, 0): 3, (2, 1): 2}),
    ("model", 2, 3, {(0, 1): 1, (1, 0): 1}),
]


@pytest.mark.parametrize(("name", "ranks", "microbatches", "wanted"), DRAWN)
def test_drawn_backlogs(name, ranks, microbatches, wanted):
    assert backlogs(with_messages(schedule(name, ranks, microbatches)).steps) == wanted


def most_in_a_run(ranks, favoured, choose) -> Counter:
    """Run a program whose sends never wait. The favoured rank runs only when no other can."""
    at, there, lying, most = [0] * len(ranks), set(), Counter(), Counter()
    while True:
        able = [
            rank
            for rank, steps in enumerate(ranks)
            if at[rank] < len(steps)
            and not (
                isinstance(step := steps[at[rank]], Receive) and (step.what, step.stage, step.microbatch) not in there
            )
        ]
        if not able:
            assert [len(steps) for steps in ranks] == at
            return most
        rank = choose([each for each in able if each != favoured] or able)
        step = ranks[rank][at[rank]]
        at[rank] += 1
        if isinstance(step, Send):
            there.add((step.what, step.stage, step.microbatch))
            lying[rank, step.peer] += 1
            most[rank, step.peer] = max(most[rank, step.peer], lying[rank, step.peer])
        elif isinstance(step, Receive):
            lying[step.peer, rank] -= 1


@settings(deadline=None)
@given(
    name=st.sampled_from(["gpipe", "1f1b", "interleaved", "zb1p", "zbv"]),
    ranks=st.integers(2, 4),
    rounds=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
def test_no_run_has_more_messages_on_a_way_and_some_has_as_many(name, ranks, rounds, seed):
    program = with_messages(schedule(name, ranks, ranks * rounds, chunks=2))
    bounds = backlogs(program.steps)
    choose = random.Random(seed).choice
    for _ in range(3):
        run = most_in_a_run(program.steps, None, choose)
        assert all(run[way] <= bound for way, bound in bounds.items())
    for (source, target), bound in bounds.items():  # the receiver does only what it must
        assert most_in_a_run(program.steps, target, choose)[source, target] == bound


def test_a_row_has_room_for_evaluations_too():
    table = schedule("1f1b", 3, 5)
    assert row_of(table, 1, 5, forwards_only=True).backlogs == {(0, 1): 5, (1, 2): 5}
    assert row_of(table, 0, 2).backlogs[0, 1] == 2
