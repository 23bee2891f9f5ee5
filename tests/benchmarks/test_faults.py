"""The fault matrix without running it: its rows, its judgement, its measures."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from chaos import chosen
from faults.bench import measured
from faults.bent import Bend
from faults.kills import KINDS, story
from faults.live import Live
from faults.matrix import ABSENT, FAULTS
from faults.state import digest, largest_difference
from faults.table import BOX, Expected, Fault, Outcome, Row, line

pytestmark = pytest.mark.command


def test_every_fault_of_the_matrix_has_a_row_or_a_reason() -> None:
    assert {each.number for each in (*FAULTS, *ABSENT)} == set(range(1, 25))
    assert {each.number for each in ABSENT} - {each.number for each in FAULTS} == {16, 21}


def test_every_row_has_a_name_of_its_own() -> None:
    assert len({fault.key for fault in FAULTS}) == len(FAULTS)


def test_the_quick_part_needs_no_box() -> None:
    assert not [fault.key for fault in FAULTS if fault.quick and fault.where == BOX]


def test_rows_that_cannot_be_injected_are_named_with_the_reason() -> None:
    run, left = chosen(FAULTS, quick=False, only="^(5|13|1) ", box="", root=False)

    assert "1 rank killed in a collective" in {fault.key for fault in run}
    assert not [fault for fault in run if fault.where == BOX or fault.root]
    assert {each.reason for each in left} == {"needs a box; give --box", "mounts; run it as root"}


GOOD = Outcome(detected_s=0.1, resumed_s=1.0, lost_steps=4, equal=True, code=0, verdict="done", attempts=2)
WANTED = Expected(attempts=2, detect_s=0.5, resume_s=5.0, lost_steps=10)


@pytest.mark.parametrize(
    ("outcome", "failures"),
    [
        (GOOD, []),
        (Outcome(**{**vars(GOOD), "code": 1}), ["exit code 1, wanted 0"]),
        (Outcome(**{**vars(GOOD), "equal": False}), ["not the weights of the uninterrupted run"]),
        (Outcome(**{**vars(GOOD), "equal": None}), ["not the weights of the uninterrupted run"]),
        (Outcome(**{**vars(GOOD), "attempts": 3}), ["3 attempts, wanted 2"]),
        (Outcome(**{**vars(GOOD), "lost_steps": 11}), ["11 steps lost, at most 10"]),
        (Outcome(**{**vars(GOOD), "detected_s": 0.6}), ["detected after 0.60 s, wanted within 0.5 s"]),
        (Outcome(**{**vars(GOOD), "resumed_s": None}), ["resumed never, wanted within 5 s"]),
        (Outcome(**{**vars(GOOD), "wrong": ("it burns",)}), ["it burns"]),
    ],
)
def test_what_an_outcome_lacks_is_said(outcome: Outcome, failures: list[str]) -> None:
    assert WANTED.failures(outcome) == failures


def test_times_are_not_judged_where_they_are_not_asked() -> None:
    slow = Outcome(**{**vars(GOOD), "detected_s": 60.0, "resumed_s": 60.0})

    assert WANTED.failures(slow, timed=False) == []


def row(event: str, time: float, **fields: Any) -> dict[str, Any]:
    return {"event": event, "time": time, **fields}


def test_times_run_from_the_fault_to_what_tells_of_it_and_to_the_next_attempts_first_step() -> None:
    events = [
        row("exited", 99.0, attempt=0, code=None),  # of an earlier fault
        row("saved", 100.1, attempt=0),
        row("exited", 100.25, attempt=0, code=None),
        row("first_step", 100.5, attempt=0),
        row("first_step", 101.5, attempt=1),
        row("ended", 105.0, attempt=1, code=0, **{"class": "done"}),
    ]

    found = measured(events, [{"attempt": 0, "lost_steps": 7}], at=100.0, before=0, killed=False)

    assert (found.detected_s, found.resumed_s, found.lost_steps, found.verdict) == (0.25, 1.5, 7, "done")


def test_a_run_that_only_ended_well_has_detected_nothing() -> None:
    events = [
        row("exited", 101.0, attempt=0, code=0),
        row("attempt_ended", 101.1, attempt=0, code=0),
        row("ended", 101.2, attempt=0, code=0, **{"class": "done"}),
    ]

    assert measured(events, [], at=100.0, before=0, killed=False).detected_s is None


def test_a_killed_supervisor_detects_nothing_and_the_next_ones_verdict_counts() -> None:
    events = [
        row("ended", 100.5, attempt=0, code=130, **{"class": "stopped"}),
        row("ended", 109.0, attempt=1, code=0, **{"class": "done"}),
    ]

    found = measured(events, [], at=100.0, before=0, killed=True)

    assert (found.detected_s, found.verdict) == (None, "done")


def test_the_table_says_what_was_wrong_below_a_row() -> None:
    fault = Fault(3, "rank stopped", "kill -STOP", WANTED, lambda bench: GOOD)

    good, bad = Row(fault, GOOD), Row(fault, Outcome(notes=("a note",)), ["nobody noticed"])

    assert line(good).split() == ["3", "rank", "stopped", "0.10", "1.00", "4", "yes", "0", "done", "ok"]
    assert line(bad).splitlines()[1:] == ["     nobody noticed", "     (a note)"]
    assert [each.record()["reached"] for each in (good, bad)] == [True, False]


def test_a_rank_that_waits_to_join_is_not_one_of_the_attempt(tmp_path: Path) -> None:
    events = [
        row("attempt", 1.0, attempt=0, world_size=2),
        row("started", 1.1, attempt=0, ranks=[[0, 70], [1, 71]]),
        row("attempt", 2.0, attempt=1, world_size=1),
        row("started", 2.1, attempt=1, ranks=[[0, 71]]),
        row("started", 2.2, attempt=1, ranks=[[1, 72]]),
    ]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "events.jsonl").write_text("".join(json.dumps(each) + "\n" for each in events))
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        live = Live(process, tmp_path, tmp_path / "said.txt")

        assert (live.ranks(), live.ranks(0)) == ({0: 71}, {0: 70, 1: 71})


def test_a_bend_meets_its_rank_and_attempts() -> None:
    bend = Bend("raise", "1", "24", "0,2")

    assert [bend.is_for(1, attempt) for attempt in range(3)] == [True, False, True]
    assert not bend.is_for(0, 0)
    assert Bend("nan", "all", "3", "all").is_for(7, 9)


def test_states_are_equal_only_with_the_same_names_and_bytes() -> None:
    whole = {"a": b"1234", "b": b""}

    assert digest(whole) == digest(dict(reversed(whole.items())))
    assert len({digest(each) for each in (whole, {"a": b"123", "b": b"4"}, {"a": b"1234", "c": b""}, {})}) == 4


def test_the_largest_difference_is_relative_to_large_values() -> None:
    from array import array

    mine = {"w": array("d", [1000.0, 0.5]).tobytes(), "w/step": b"\x00\x00\x80\x3f"}
    theirs = {"w": array("d", [1001.0, 0.5]).tobytes(), "w/step": b"\x00\x00\x80\x3f"}

    assert largest_difference(mine, theirs) == pytest.approx(1 / 1001)
    assert largest_difference(mine, mine | {"w/step": b"\x00\x00\x00\x40"}) == float("inf")


@pytest.mark.parametrize("kills", [3, 20])
def test_all_kinds_are_killed_about_as_often(kills: int) -> None:
    _, kinds = story(kills, seed=0)

    assert len(kinds) == kills
    assert {kinds.count(kind) for kind in KINDS} <= {kills // 3, kills // 3 + 1}
    assert story(kills, seed=0) == story(kills, seed=0)
