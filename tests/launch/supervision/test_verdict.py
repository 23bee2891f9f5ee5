"""The verdict of an attempt, against drawn cases: who is to blame, who was dragged along, what a shell sees."""

import itertools
import json
import random
import signal
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.jobs.basics.reading import LONGEST_LINE_BYTES
from muster.launch.common.fields import typed
from muster.launch.records.runrows import read_victims
from muster.launch.records.verdict import MOST_VICTIMS, RankEnd, Stop, Verdict, cause_of, judge

OWN = {"report": "failed", "kind": "ValueError", "message": "bad", "peer": False, "time": 1.0}
PEER = {**OWN, "kind": "RuntimeError", "message": "connection closed", "peer": True}


def ending(rank: int | None, ended: float, cause: str, *, code: int | None = 1, signal: str | None = None) -> RankEnd:
    node = 0 if rank is None else rank // 2
    return RankEnd(rank, node, f"n{node}", code, signal, ended, cause, f"message of {rank}", ["a last line"])


@pytest.mark.parametrize(
    ("code", "signal_name", "sent", "failure", "cause"),
    [
        (0, None, None, {}, "done"),
        (0, None, "SIGTERM", {}, "done"),  # it heard TERM and ended well
        (0, None, None, OWN, "done"),  # the code is the truth
        (1, None, None, OWN, "own"),
        (1, None, None, {}, "own"),  # a program of the user's reports nothing
        (127, None, None, OWN, "own"),
        (None, "SIGSEGV", None, {}, "own"),
        (None, "SIGKILL", None, {}, "own"),  # by somebody else: we sent nothing
        (1, None, None, PEER, "peer"),
        (1, None, "SIGTERM", PEER, "peer"),
        (None, "SIGABRT", None, PEER, "peer"),  # a library that aborts after the loss
        (None, "SIGTERM", "SIGTERM", {}, "stopped"),
        (None, "SIGKILL", "SIGKILL", {}, "stopped"),
        (143, None, "SIGTERM", {}, "stopped"),  # a handler of the program's own
        (1, None, "SIGTERM", OWN, "own"),  # it had failed before it heard us
        (None, "SIGTERM", "SIGTERM", OWN, "stopped"),
    ],
)
def test_the_cause_follows_from_the_end_the_last_signal_sent_and_the_ranks_own_report(
    code, signal_name, sent, failure, cause
) -> None:
    assert cause_of(code, signal_name, sent, failure) == cause


def test_the_earliest_failure_of_ones_own_wins_over_an_earlier_loss_of_a_peer() -> None:
    lost = ending(0, 10.0, "peer")
    killed = ending(3, 10.5, "own", code=None, signal="SIGKILL")
    late = ending(1, 11.0, "own", code=7)
    verdict = judge([lost, late, killed], None)
    assert verdict.first is killed
    assert verdict.victims == (lost, late)
    assert (verdict.code, verdict.name) == (137, "signal")
    assert verdict.message == "rank 3 on node 1 (n1) was killed by SIGKILL: message of 3"


def test_without_a_failure_of_its_own_the_earliest_lost_peer_is_first() -> None:
    verdict = judge([ending(1, 3.0, "peer"), ending(0, 2.0, "peer", code=9), ending(2, 1.0, "done", code=0)], None)
    assert verdict.first.rank == 0
    assert [victim.rank for victim in verdict.victims] == [1]
    assert verdict.code == 9
    assert verdict.message == "rank 0 on node 0 (n0) exited with code 9: message of 0"


def test_ranks_that_we_stopped_are_victims_and_those_that_were_done_are_not() -> None:
    failed = ending(2, 5.0, "own", code=3)
    stopped = ending(0, 5.5, "stopped", code=None, signal="SIGTERM")
    verdict = judge([ending(1, 1.0, "done", code=0), stopped, failed], None)
    assert verdict == Verdict(3, failed.sentence(), failed, (stopped,))


@pytest.mark.parametrize("name", ["SIGHUP", "SIGKILL", "SIGSEGV", "SIGTERM"])
def test_a_signal_becomes_128_plus_its_number(name: str) -> None:
    killed = ending(0, 1.0, "own", code=None, signal=name)
    assert killed.exit_code == judge([killed], None).code == 128 + signal.Signals[name].value


def test_a_lost_node_is_named_as_a_node() -> None:
    lost = ending(None, 1.0, "own", code=69)
    verdict = judge([lost, ending(2, 1.2, "peer")], None)
    assert (verdict.code, verdict.name, verdict.message) == (69, "unreachable", "node 0 (n0): message of None")


def test_nothing_failed_is_done_and_counts_the_ranks() -> None:
    two = [ending(rank, float(rank), "done", code=0) for rank in range(2)]
    assert judge(two, None) == Verdict(0, "2 ranks ended with 0")
    assert judge(two[:1], None).message == "1 rank ended with 0"
    assert judge(two, None).name == "done"


def test_a_stop_by_the_user_blames_nobody_and_lists_all_that_were_not_done() -> None:
    done, failed = ending(0, 1.0, "done", code=0), ending(1, 3.0, "own")
    stopped = ending(2, 2.0, "stopped", code=None, signal="SIGTERM")
    verdict = judge([failed, done, stopped], Stop(130, "stopped by Ctrl-C"))
    assert verdict == Verdict(130, "stopped by Ctrl-C", None, (stopped, failed))
    assert verdict.name == "stopped"


def test_the_record_is_plain_values() -> None:
    failed, lost = ending(1, 2.0, "own", code=5), ending(0, 1.0, "peer")
    record = judge([lost, failed], None).record()
    assert sorted(record) == ["class", "code", "first", "message", "victims"]
    assert (record["class"], record["code"]) == ("failed", 5)
    assert record["first"] == {
        "rank": 1,
        "node": 0,
        "host": "n0",
        "code": 5,
        "signal": None,
        "ended": 2.0,
        "cause": "own",
        "message": "message of 1",
        "last_lines": ["a last line"],
        "step": None,
        "hung": False,
        "ours": True,
    }
    assert [victim["rank"] for victim in record["victims"]] == [0]
    assert judge([], None).record()["first"] is None


def test_a_programs_own_code_has_no_class_of_ours() -> None:
    own = replace(ending(0, 1.0, "own", code=130), ours=False)
    assert judge([own], None).name == "failed"
    assert judge([ending(0, 1.0, "own", code=78)], None).name == "refused"
    killed = replace(ending(0, 1.0, "own", signal="SIGRTMIN+1"), ours=False)
    assert (judge([killed], None).name, judge([killed], None).code) == ("signal", 128 + 35)


CASES = st.tuples(
    st.sampled_from([("done", 0, None), ("own", 1, None), ("own", None, "SIGKILL"), ("peer", 1, None)])
    | st.sampled_from([("stopped", None, "SIGTERM"), ("stopped", 143, None)]),
    st.floats(0, 1e9),
)


@given(st.lists(CASES, max_size=8, unique_by=lambda case: case[1]), st.randoms(use_true_random=False))
def test_the_order_in_which_endings_were_seen_does_not_matter(cases, order: random.Random) -> None:
    endings = [
        ending(rank, ended, cause, code=code, signal=name) for rank, ((cause, code, name), ended) in enumerate(cases)
    ]
    shuffled = order.sample(endings, len(endings))
    for stop in (None, Stop(130, "stopped by Ctrl-C")):
        assert judge(shuffled, stop) == judge(endings, stop)


@given(st.lists(CASES, min_size=1, max_size=8, unique_by=lambda case: case[1]))
def test_first_and_victims_are_all_that_did_not_end_well_each_once_in_order_of_time(cases) -> None:
    endings = [
        ending(rank, ended, cause, code=code, signal=name) for rank, ((cause, code, name), ended) in enumerate(cases)
    ]
    verdict = judge(endings, None)
    blamed = [*([verdict.first] if verdict.first else []), *verdict.victims]
    if verdict.first is None:
        assert verdict.code == 0
        assert {each.cause for each in endings} <= {"done", "stopped"}
        return
    assert sorted(each.rank for each in blamed) == [each.rank for each in endings if each.cause != "done"]
    assert all(one.ended < other.ended for one, other in itertools.pairwise(verdict.victims))
    same_kind = [each for each in endings if each.cause == verdict.first.cause]
    assert verdict.first == min(same_kind, key=lambda each: each.ended)
    assert verdict.first.cause == "own" or all(each.cause != "own" for each in endings)
    assert verdict.code == verdict.first.exit_code != 0


def test_the_row_of_an_attempt_lists_most_victims_of_a_large_run_as_ranges() -> None:
    lost = [ending(rank, 10.0, "peer") for rank in range(1, 60_000)]
    stopped = [ending(rank, 11.0, "stopped", code=143) for rank in range(60_001, 80_000, 2)]
    node = ending(None, 11.0, "own", code=69)
    verdict = judge([ending(0, 9.0, "own", code=7), *lost, *stopped, node], None)
    line = json.dumps(verdict.record())
    assert len(line) < LONGEST_LINE_BYTES
    row = typed(json.loads(line))
    assert len(row["victims"]) == MOST_VICTIMS + 1  # and the node
    read = read_victims(row)
    assert {(each.rank, each.cause) for each in read} == {(each.rank, each.cause) for each in verdict.victims}
    assert len(read) == len(verdict.victims)
