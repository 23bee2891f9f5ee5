"""How many starts of a scheduler's job in a row have brought its run no further."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.launch.scheduler.allocations import allocations, disagreement, fruitless


def start(restarts: int, job: str = "12") -> dict[str, Any]:
    return {"event": "allocation", "job": job, "restarts": restarts}


def begun(step: int) -> dict[str, Any]:
    return {"event": "resuming", "attempt": 1, "checkpoint": f"step-{step}", "step": step}


def saved(step: int) -> dict[str, Any]:
    return {"event": "saved", "attempt": 1, "step": step}


@pytest.mark.parametrize(
    ("rows", "count"),
    [
        ([], 0),
        ([start(0)], 1),  # it has ended before anything was saved
        ([start(0), saved(5)], 0),
        ([start(0), saved(5), start(1), begun(5)], 1),
        ([start(0), saved(5), start(1), begun(5), saved(5)], 1),  # what it began from, saved once more
        ([start(0), saved(5), start(1), begun(5), saved(9)], 0),
        ([start(0), saved(5), start(1), start(2), start(3)], 3),
        ([start(0), saved(5), start(1), begun(5), start(2), begun(5), start(3), begun(5)], 3),
        # Its last checkpoint was committed, and nobody was left to say so.
        ([start(0), start(1), begun(10), start(2), begun(10)], 2),
        # A bad checkpoint, and back to the one before: not further, until it saves again.
        ([start(0), saved(5), start(1), begun(5), saved(9), start(2), begun(5), saved(8)], 0),
        ([start(0), start(0, job="13"), start(0, job="13")], 2),  # somebody has resumed it
        ([start(0), start(1), start(2), start(0, job="13"), saved(5)], 0),
    ],
)
def test_starts_without_a_new_checkpoint_are_counted_from_the_newest(rows: list[dict[str, Any]], count: int) -> None:
    job = next((row["job"] for row in reversed(rows) if row["event"] == "allocation"), "12")
    assert fruitless(allocations(rows, job)) == count


def test_starts_that_left_no_row_made_no_checkpoint_either() -> None:
    found = allocations([start(0), saved(5), start(1), saved(9)], "12")
    assert fruitless(found, 2) == 0
    assert fruitless(found, 4) == 2
    assert fruitless([], 50) == 50
    assert fruitless([], 0) == 0


@given(st.lists(st.booleans(), max_size=8))
def test_any_progress_ends_the_count(progress: list[bool]) -> None:
    rows, step = [], 0
    for number, is_further in enumerate(progress):
        rows += [start(number), begun(step)]
        if is_further:
            step += 5
            rows.append(saved(step))
    expected = next((count for count, is_further in enumerate(reversed(progress)) if is_further), len(progress))
    assert fruitless(allocations(rows, "12")) == expected


def test_counts_that_differ_are_said_with_what_it_means() -> None:
    found = allocations([start(0), start(1)], "12")
    assert disagreement(found, 2, "12") == ""
    assert "the other starts ended before Muster began; see slurm-12.out" in disagreement(found, 50, "12")
    assert "its count was reset" in disagreement(found, 0, "12")
