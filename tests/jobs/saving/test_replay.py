"""The replay audit: which losses are compared, and what is said of them."""

import math
from pathlib import Path

from muster.jobs.basics.files import append_lines
from muster.jobs.saving.replay import Replay, logged_losses
from support.checkpoints import Told


def test_the_newest_loss_of_each_later_step_of_an_earlier_attempt_counts(tmp_path: Path) -> None:
    rows = [
        {"step": 1, "attempt": 0, "loss": 9.0},
        {"step": 2, "attempt": 0, "loss": 8.0},
        {"step": 2, "attempt": 0, "loss": 1.0, "evaluation": True},
        {"step": 3, "attempt": 0, "loss": 7.0},
        {"step": 2, "attempt": 1, "loss": 8.5},
        {"step": 3, "attempt": 2, "loss": 1.0},
        {"step": 4, "attempt": 1, "loss": None},
    ]
    append_lines(tmp_path / "metrics.jsonl", rows)
    assert logged_losses(tmp_path / "metrics.jsonl", after=1, attempt=2) == {2: 8.5, 3: 7.0, 4: None}
    assert logged_losses(tmp_path / "gone", after=0, attempt=1) == {}


def test_equal_losses_are_said_once_when_the_last_of_them_is_there() -> None:
    told = Told()
    replay = Replay({3: 0.1, 4: None, 5: 0.3}, told)
    assert replay.check([(3, 0.1), (4, math.nan)]) is None
    assert replay.check([(5, 0.3), (6, 0.2)]) == "3 steps repeated: the same losses, bit for bit"
    assert replay.check([(7, 0.2)]) is None
    (row,) = told.rows
    assert (row["report"], row["steps"], row["compared"], row["worst"]) == ("replayed", 3, 3, 0.0)


def test_other_losses_are_said_with_the_largest_difference() -> None:
    told = Told()
    said = Replay({3: 0.5, 4: 2.0}, told).check([(3, 0.5), (4, 2.0 * (1 + 3e-7))])
    assert said == "2 steps repeated: losses differ by at most 3e-07, relative to the logged ones"
    assert told.rows[0]["worst"] > 0.0


def test_a_loss_that_is_a_number_on_one_side_only_differs() -> None:
    said = Replay({1: None}, Told()).check([(1, 0.5)])
    assert said == "1 step repeated: losses differ by at most inf, relative to the logged ones"


def test_without_logged_steps_nothing_is_said() -> None:
    told = Told()
    assert Replay({}, told).check([(1, 0.5)]) is None
    assert told.rows == []
