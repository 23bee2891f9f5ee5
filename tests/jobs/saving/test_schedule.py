"""When a save is due: multiples of the training's steps, or steps that a clock asks for."""

from pathlib import Path

import pytest

from muster.jobs.basics.files import append_lines
from muster.jobs.runfolder.rundir import RunDir
from muster.jobs.saving.schedule import SaveSchedule, failures_so_far
from muster.jobs.spec.failover import CheckpointSettings


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def schedule(clock: Clock, done: int = 0, **settings) -> SaveSchedule:
    return SaveSchedule(CheckpointSettings.model_validate(settings), done, clock=clock)


def test_every_so_many_steps_are_multiples_wherever_the_attempt_began():
    each = schedule(Clock(), done=7, every_steps=5)
    assert each.ask(7) == (False, 10)
    assert each.ask(10) == (True, 15)


def saved_at(each: SaveSchedule, clock: Clock, step_s: float, steps: int, log_every: int) -> list[float]:
    """Train; return the seconds at which a save was agreed."""
    saved, due, began_s = [], -1, clock.now_s
    for done in range(1, steps + 1):
        clock.now_s += step_s
        if done == 1 or done % log_every == 0 or done == due:
            saves, due = each.ask(done)
            if saves:
                saved.append(clock.now_s - began_s)
    return saved


@pytest.mark.parametrize(
    ("every_s", "step_s", "steps", "log_every", "saves_s"),
    [
        *((10.0, 0.5, 100, log_every, [10.0, 20.0, 30.0, 40.0, 50.0]) for log_every in (1, 20, 1000)),
        (1.0, 60.0, 3, 20, [60.0, 120.0, 180.0]),  # steps longer than the interval
    ],
)
def test_every_so_many_seconds_is_kept_by_the_speed_of_the_steps(every_s, step_s, steps, log_every, saves_s):
    clock = Clock()
    assert saved_at(schedule(clock, every_s=every_s), clock, step_s, steps, log_every) == saves_s


def test_a_slow_first_step_does_not_bring_a_save_before_its_time():
    clock = Clock()
    each = schedule(clock, every_s=10.0)
    clock.now_s += 4.0  # the first step imports, compiles, fills caches
    assert each.ask(1) == (False, 3)
    clock.now_s += 0.02
    saves, due = each.ask(3)
    assert not saves
    assert due == pytest.approx(3 + (10 - 4.02) / 0.01, abs=1)


def test_auto_saves_more_often_in_a_run_that_fails_often_and_never_for_over_a_hundredth_of_the_time():
    clock = Clock()
    calm, failing = schedule(clock), schedule(clock, every_s="auto")
    failing.elapsed_s, failing.failures = 3600.0, 20
    for each in (calm, failing):
        each.measured(stall_s=0.5, save_s=2.0)
    assert 50.0 <= failing.interval_s < calm.interval_s
    failing.failures = 10**9
    assert failing.interval_s == 50.0
    failing.measured(stall_s=0.0, save_s=200.0)
    assert failing.interval_s == 200.0, "never more often than a save is done"


def test_attempts_so_far_count_as_failures_unless_they_were_told_to_end(tmp_path: Path):
    run = RunDir(tmp_path)
    assert failures_so_far(run) == (0.0, 0)
    classes = ["signal", "requeue", "stopped", "failed"]
    append_lines(
        run.attempts, [{"started": 10.0 * i, "ended": 10.0 * i + 4.0, "class": c} for i, c in enumerate(classes)]
    )
    append_lines(run.attempts, [{"class": "failed"}])
    assert failures_so_far(run) == (16.0, 2)
