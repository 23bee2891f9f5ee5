"""A rank's page as it trains: how far it is, how slow its steps are, and where it is told to stop."""

import threading
import time

import pytest

from muster.jobs.node import page
from muster.jobs.node.page import NEVER, Page, Phase
from muster.jobs.saving import pace as pace_module
from muster.jobs.saving.pace import OF_LATE, Pace


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Page:
    made = Page()
    monkeypatch.setattr(page, "own", made)
    return made


def test_steps_and_the_slowest_of_late_stand_on_the_page(own: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(pace_module.time, "monotonic", lambda: now[0])
    pace = Pace()
    assert own.phase == Phase.RUN

    def step(done: int, seconds: float) -> None:
        assert not pace.stops(done - 1)
        now[0] += seconds
        pace.step_done(done)

    step(1, 8.0)
    beats = own.beats
    for done in range(2, OF_LATE + 2):
        step(done, 0.5)
    assert (own.steps, own.slowest_s) == (OF_LATE + 1, 8.0)
    assert own.beats > beats
    for done in range(OF_LATE + 2, 3 * OF_LATE):
        step(done, 0.5)
    assert own.slowest_s == 0.5, "a slow first step is not of late for ever"


def test_a_rank_that_is_asked_to_hold_waits_for_the_step_to_stop_at_and_goes_on_to_it(own: Page) -> None:
    own.hold = 1
    pace, answers = Pace(), []
    rank = threading.Thread(target=lambda: answers.append(pace.stops(7)))
    rank.start()
    deadline = time.monotonic() + 10.0
    while own.held != 7:
        assert time.monotonic() < deadline
    own.stop_at = 9
    rank.join(10.0)
    assert answers == [False]
    assert own.held == NEVER
    assert [pace.stops(done) for done in (8, 9, 10)] == [False, True, True]
