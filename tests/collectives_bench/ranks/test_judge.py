"""Who is to blame, from the endings of all ranks."""

from dataclasses import replace

import pytest

from muster.collectives_bench.ranks.judge import Blame, WorkerEnd, judge, pair_culprit

TIMEOUT_S = 2.0
LATE = "no progress for 2 s (timeout_s)"
CLOSED = "RuntimeError: Connection closed by peer"
TIMED_OUT = "RuntimeError: Timed out waiting 2000ms for recv operation to complete"


def done(rank):
    return WorkerEnd("done", 9.0, 90, rank=rank, cell=5)


def raised(rank, message="ValueError: no", *, time=5.0, cell=1, beats=40):
    return WorkerEnd("raised", time, beats, message, rank=rank, cell=cell)


def victim(rank, message=CLOSED, *, time=5.0, cell=1, beats=40):
    return WorkerEnd("raised", time, beats, message, lost=True, rank=rank, cell=cell)


def died(rank, message="was killed by SIGKILL", *, time=5.0):
    return WorkerEnd("died", time, 40, message, rank=rank, cell=1)


def silent(rank, *, beats=40, stopped=False, message=""):
    return WorkerEnd("silent", 8.0, beats, message, stopped=stopped, rank=rank, cell=1)


CASES = {
    "who failed by itself, though its victims noticed first": (
        [victim(0, time=4.9), raised(1), victim(2, time=4.8)],
        Blame(1, "failed", "rank 1: ValueError: no", 1),
    ),
    "the first of two that failed by themselves": (
        [raised(0, "ValueError: mine", time=5.2), died(1, time=5.1)],
        Blame(1, "failed", "rank 1 was killed by SIGKILL", 1),
    ),
    "who failed by itself, though another one was stopped": (
        [silent(0, stopped=True), raised(1)],
        Blame(1, "failed", "rank 1: ValueError: no", 1),
    ),
    "who was stopped by a signal": (
        [victim(0, TIMED_OUT), silent(1), silent(2, stopped=True)],
        Blame(2, "timeout", f"{LATE}: rank 2 is suspended by a signal", 1),
    ),
    "who says nothing while the others waited": (
        [victim(0, TIMED_OUT), silent(1, message="bench.py:7 run"), victim(2, TIMED_OUT)],
        Blame(1, "timeout", f"{LATE}: rank 1 did not arrive (it is at bench.py:7 run)", 1),
    ),
    "the last of those that say nothing": (
        [victim(0, TIMED_OUT, beats=41), silent(1, beats=41), silent(2, beats=38)],
        Blame(2, "timeout", f"{LATE}: rank 2 did not arrive", 1),
    ),
    "who is behind when all say nothing": (
        [silent(0, beats=41), silent(1, beats=39), silent(2, beats=41)],
        Blame(1, "timeout", f"{LATE}: rank 1 is behind", 1),
    ),
    "nobody when all say nothing at the same place": (
        [silent(0), silent(1)],
        Blame(None, "timeout", f"{LATE}: all ranks wait", 1),
    ),
    "nobody when all lost each other": (
        [victim(0), victim(1, time=4.0)],
        Blame(None, "failed", f"rank 1: {CLOSED}", 1),
    ),
    "who is behind when all were timed out": (
        [victim(0, TIMED_OUT, beats=50), victim(1, TIMED_OUT, time=4.0, beats=44), done(2)],
        Blame(1, "timeout", f"rank 1: {TIMED_OUT}; rank 1 is behind", 1),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_culprit_is(case):
    endings, wanted = CASES[case]
    assert judge(endings, TIMEOUT_S) == wanted


PAIRS = {
    "who failed by itself": ([victim(0), died(1)], 1),
    "who was stopped, not who waited for it": ([victim(0), silent(1, stopped=True)], 1),
    "who lost its partner, not who waited for the round to end": ([silent(0), victim(1, time=5.1), victim(2)], 2),
    "nobody, where all wait": ([silent(0), silent(1)], None),
}


@pytest.mark.parametrize("case", PAIRS)
def test_the_pair_that_failed_is_told_by(case):
    endings, rank = PAIRS[case]
    told = pair_culprit([replace(each, pair=(each.rank, 9)) for each in endings])
    assert (None if told is None else told.rank) == rank


def test_who_rested_tells_of_no_pair():
    assert pair_culprit([died(0), victim(1)]) is None
