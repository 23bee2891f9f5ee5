"""Which steps are recorded, and what a job file may say of it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from muster.jobs.spec.profile import OFF, ProfileSettings
from muster.jobs.trace.window import ProfileWindow, window_of


def settings(**values) -> ProfileSettings:
    return ProfileSettings.model_validate(values)


@pytest.mark.parametrize(
    ("done", "steps", "first", "last"),
    [(0, 100, 6, 8), (0, 8, 6, 8), (0, 7, 5, 7), (0, 4, 2, 4), (0, 2, 1, 2), (40, 100, 46, 48), (97, 100, 98, 100)],
)
def test_the_default_window_and_what_a_short_job_has_of_it(done: int, steps: int, first: int, last: int) -> None:
    window = window_of(settings(on=True), done=done, steps=steps)
    assert (window.first, window.last) == (first, last)
    assert bool(window.note) == (steps - done < 8)


def test_an_attempt_with_nothing_left_to_do_records_nothing_and_says_so() -> None:
    window = window_of(settings(on=True), done=9, steps=9)
    assert window.count == 0
    assert window.note == "nothing to profile: this attempt has no steps left"


@given(st.integers(1, 30), st.integers(1, 10), st.integers(0, 50), st.integers(0, 50))
def test_a_window_lies_in_the_attempt_and_is_as_long_as_can_be(first: int, count: int, done: int, left: int) -> None:
    window: ProfileWindow = window_of(settings(first_step=first, steps=count), done=done, steps=done + left)
    assert window.count == min(count, left)
    if left:
        assert done < window.first <= window.last <= done + left
        assert window.first <= done + first


def test_a_word_or_a_mapping() -> None:
    assert settings(on=False) == ProfileSettings.model_validate(False) == OFF
    assert not OFF.on
    assert ProfileSettings.model_validate({}).on
    assert ProfileSettings.model_validate(True).on
    assert settings(steps=5) == ProfileSettings(on=True, steps=5)
    assert not settings(on=False, steps=5).on
    again = settings(steps=5).model_dump(exclude_unset=True)
    assert ProfileSettings.model_validate(again) == settings(steps=5)


@pytest.mark.parametrize("wrong", [{"step": 3}, {"steps": 0}, {"steps": 101}, {"first_step": 0}, "yes", 3])
def test_what_is_no_profile_is_refused(wrong: object) -> None:
    with pytest.raises(ValidationError):
        ProfileSettings.model_validate(wrong)


def test_a_word_that_is_neither_true_nor_false_is_told_what_may_stand_there() -> None:
    with pytest.raises(ValidationError, match=r"must be true, false or a mapping \(on, first_step, .*\), got 'yes'"):
        ProfileSettings.model_validate("yes")
