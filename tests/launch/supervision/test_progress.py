"""Whether a job hangs: a table of phases and limits, and the records of several nodes."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.jobs.node.page import Phase
from muster.launch.supervision.progress import FRESH_S, OUTPUT, Hang, hang, limit_s, silence

WORDS = [phase.word for phase in Phase]
NOW = 1000.0


def record(age_s: float, *phases: str, slowest_s: float = 0.1, steps: int = 7) -> dict[str, Any]:
    return {"steps": steps, "beats_age_s": age_s, "ranks": {}, "phases": list(phases), "slowest_s": slowest_s}


def fresh(*records: dict[str, Any] | None) -> list[tuple[dict[str, Any] | None, float]]:
    """Records that have come just now."""
    return [(each, NOW) for each in records]


@pytest.mark.parametrize(
    ("phase", "slowest_s", "hang_s", "limit"),
    [
        ("start", 0.0, None, None),
        ("start", 0.0, 5.0, None),
        ("run", 0.1, None, 30.0),
        ("run", 5.0, None, 50.0),
        ("run", 0.1, 5.0, 5.0),
        ("run", 4.0, 5.0, 5.0),  # what the user says stands
        ("run", 0.0, None, 600.0),  # its first step
        ("run", 0.0, 5.0, 50.0),
        ("end", 0.0, None, 30.0),
        ("end", 0.1, 5.0, 5.0),
        ("load", 0.0, None, 600.0),
        ("load", 0.0, 5.0, 50.0),
        ("save", 0.1, None, 600.0),
        ("save", 90.0, None, 900.0),
        ("evaluate", 0.1, 100.0, 1000.0),
    ],
)
def test_how_long_each_phase_may_be_silent(phase: str, slowest_s: float, hang_s: float | None, limit) -> None:
    assert limit_s(phase, slowest_s, hang_s) == limit


@given(st.sampled_from(WORDS), st.floats(0.0, 1e4), st.none() | st.floats(0.1, 1e4))
def test_no_phase_has_less_time_than_a_step(phase: str, slowest_s: float, hang_s: float | None) -> None:
    limit, step = limit_s(phase, slowest_s, hang_s), limit_s("run", slowest_s or 1e-9, hang_s)
    assert step is not None
    assert limit is None or limit >= step


def test_a_job_in_which_nobody_moves_for_longer_than_the_limit_hangs() -> None:
    assert hang(fresh(record(29.9, "run"), record(45.0, "run")), NOW, None) is None
    found = hang(fresh(record(30.5, "run", steps=6), record(45.0, "run", steps=7)), NOW, None)
    assert found == Hang(seconds=30.5, limit_s=30.0, phase="run", steps=7)


def test_one_that_moves_keeps_the_job_from_hanging() -> None:
    assert hang(fresh(record(500.0, "run"), record(0.2, "run")), NOW, 5.0) is None


def test_ranks_that_wait_for_the_save_of_another_are_not_taken_for_hung() -> None:
    waiting, saving = record(200.0, "run"), record(200.0, "run", "save")
    assert hang(fresh(waiting, saving), NOW, None) is None
    assert hang(fresh(waiting, waiting), NOW, None) is not None
    too_long = hang(fresh(record(601.0, "run"), record(601.0, "run", "save")), NOW, None)
    assert (too_long.phase, too_long.limit_s) == ("save", 600.0)


def test_while_a_rank_starts_there_is_no_hang() -> None:
    assert hang(fresh(record(1e6, "run"), record(1e6, "start")), NOW, 5.0) is None


def test_the_limit_of_a_step_is_that_of_the_slowest_rank() -> None:
    records = fresh(record(60.0, "run", slowest_s=0.1), record(60.0, "run", slowest_s=8.0))
    assert hang(records, NOW, None) is None


def test_nodes_without_ranks_say_nothing() -> None:
    ended = record(0.0)
    assert hang([], NOW, None) is None
    assert hang(fresh(None, None), NOW, None) is None
    assert hang(fresh(ended), NOW, None) is None
    assert hang([(ended, 0.0), (None, 0.0), (record(31.0, "run"), NOW)], NOW, None) is not None


def test_time_since_a_record_came_counts() -> None:
    assert hang([(record(29.0, "run"), NOW - 1.5)], NOW, None) == Hang(30.5, 30.0, "run", 7)


def test_a_supervisor_that_stood_still_itself_calls_nobody_hung() -> None:
    """What the agents told meanwhile lies unread."""
    assert hang([(record(0.1, "run"), NOW - 100.0)], NOW, 5.0) is None
    assert hang([(record(9.0, "run"), NOW), (record(9.0, "run"), NOW - FRESH_S - 0.1)], NOW, 5.0) is None


@given(
    st.lists(
        st.tuples(
            st.floats(0.0, 1e4),
            st.lists(st.sampled_from(WORDS), min_size=1, max_size=4),
            st.floats(0.0, 100.0),
            st.floats(0.0, FRESH_S),
        ),
        min_size=1,
        max_size=5,
    ),
    st.none() | st.floats(0.1, 100.0),
)
def test_a_hang_is_longer_than_the_limit_of_every_phase_there_is(nodes, hang_s: float | None) -> None:
    records = [(record(age, *phases, slowest_s=slowest), NOW - old) for age, phases, slowest, old in nodes]
    found = hang(records, NOW, hang_s)
    slowest_s = max(slowest for _, _, slowest, _ in nodes)
    limits = [limit_s(phase, slowest_s, hang_s) for _, phases, _, _ in nodes for phase in phases]
    silence = min(age + NOW - at for (age, *_), (_, at) in zip(nodes, records, strict=True))
    assert (found is not None) == (None not in limits and silence > max(limits))
    if found is not None:
        assert found.seconds == silence
        assert found.phase in {phase for _, phases, _, _ in nodes for phase in phases}


# Programs without a session -------------------------------------------------------------------------------------------


def program(output_age_s: float | None, *phases: str, sessions: int = 0) -> dict[str, Any]:
    return {**record(0.0, *(phases or ("start",))), "sessions": sessions, "output_age_s": output_age_s}


@pytest.mark.parametrize(
    ("records", "began_s", "expected"),
    [
        ([program(4.9), program(300.0)], 0.0, None),
        ([program(5.1), program(None)], 0.0, Hang(5.1, 5.0, OUTPUT, 0)),
        ([program(None), program(None)], NOW - 59.0, None),  # nothing yet: libraries are being imported
        ([program(None), program(None)], NOW - 61.0, Hang(61.0, 60.0, OUTPUT, 0)),
        ([program(50.0), program(50.0, "run", sessions=1)], 0.0, None),
        ([None, {**program(50.0), "phases": []}], 0.0, None),
    ],
)
def test_programs_hang_when_none_has_written_anything_for_long(
    records: list[dict[str, Any] | None], began_s: float, expected: Hang | None
) -> None:
    found = silence(fresh(*records), NOW, 5.0, began_s, 60.0)
    assert found == (expected and Hang(pytest.approx(expected.seconds), expected.limit_s, OUTPUT, 0))


def test_a_node_of_programs_that_has_told_nothing_of_late_is_not_judged() -> None:
    assert silence([(program(50.0), NOW), (program(50.0), NOW - FRESH_S - 0.1)], NOW, 5.0, 0.0, 60.0) is None
