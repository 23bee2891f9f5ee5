"""The row of a case, from what its process told and how it ended."""

import pytest

from muster.jobs.models.shapes import GPT_SHAPES, VGG_SHAPES
from muster.jobs.timing.settings import Case
from muster.jobs.train.timing.launch_manager import judged, size_of
from muster.jobs.train.timing.memory import GB, refusal
from muster.jobs.world.forked import Ended
from support.timings import settings

CASE = Case("gpt-nano", "step", "fp32")
BUILT = [{"build_s": 0.5}]
STEPS = [{"step": seconds} for seconds in (0.1, 0.012, 0.010)]
DONE = Ended("done", 1.0)
LATE = Ended("silent", 2.0)


def row(heard, ended, **changes):
    asked = settings(warmup=1, steps=2, timeout_s=3.0)
    return judged(asked, CASE, heard, ended, size=size_of(asked, CASE), matmul_rate=1e12, **changes)


def test_warm_up_steps_stand_apart_and_the_others_are_summed_up():
    found = row([*BUILT, *STEPS, {"peak_bytes": 77}], DONE)
    assert (found.state, found.warm_up_s, found.steps_s) == ("ok", [0.1], [0.012, 0.010])
    assert found.summary is not None
    assert (found.summary.n, found.summary.mean_s, found.summary.min_s) == (2, 0.011, 0.010)
    assert found.summary.std_s == pytest.approx(0.002**0.5 / 10**1.5, rel=1e-6)
    assert (found.first_s, found.build_s, found.peak_bytes) == (0.1, 0.5, 77)
    assert found.rate == 16 * 128 / 0.011
    assert found.flops_per_s == found.flops / 0.011
    assert found.matmul_share == found.flops / 0.011 / 1e12


def test_a_launch_is_added_to_those_before_it_and_its_failure_is_the_rows():
    first = row([*BUILT, *STEPS, {"peak_bytes": 77}], DONE)
    second = row([*BUILT, *STEPS, {"peak_bytes": 70}], Ended("done", 2.0), earlier=first, foreign=0.25)
    assert (second.warm_up_s, second.steps_s, second.peak_bytes) == ([0.1] * 2, [0.012, 0.010] * 2, 77)
    assert [(each.warm_up, each.steps, each.time, each.foreign) for each in second.launches] == [
        (1, 2, 1.0, None),
        (1, 2, 2.0, 0.25),
    ]
    third = row([*BUILT, STEPS[0]], LATE, earlier=second)
    assert (third.state, third.steps_s, third.launches[-1].steps) == ("timeout", second.steps_s, 0)
    assert third.reason == "1 of 3 steps were done in 3 s (--timeout)"
    assert len(third.steps_of_launches) == 2


def test_without_warm_up_the_first_step_counts():
    found = judged(settings(warmup=0, steps=3), CASE, [*BUILT, *STEPS], DONE, size=size_of(settings(), CASE))
    assert found.summary is not None
    assert (found.warm_up_s, found.summary.n, found.first_s) == ([], 3, 0.1)
    assert found.matmul_share is None


@pytest.mark.parametrize(
    ("heard", "ended", "state", "reason"),
    [
        ([*BUILT, {"memory": "asked for 2.0 GB"}], DONE, "memory", "asked for 2.0 GB"),
        ([{"refused": "no compiler"}], DONE, "refused", "no compiler"),
        ([], LATE, "timeout", "its model was not built in 3 s (--timeout)"),
        ([*BUILT, *STEPS[:2]], LATE, "timeout", "2 of 3 steps were done in 3 s (--timeout)"),
        (
            BUILT,
            Ended("died", 1.0, message="was killed by SIGKILL"),
            "memory",
            "probably by the kernel because memory ran out",
        ),
        (BUILT, Ended("died", 1.0, message="was killed by SIGABRT; last words: std::bad_alloc"), "memory", "bad_alloc"),
        (BUILT, Ended("died", 1.0, message="was killed by SIGSEGV"), "failed", "was killed by SIGSEGV"),
        (BUILT, Ended("raised", 1.0, message="ValueError: no"), "failed", "ValueError: no"),
    ],
)
def test_what_went_wrong_is_the_state_with_its_reason(heard, ended, state, reason):
    found = row(heard, ended)
    assert found.state == state
    assert reason in found.reason
    assert found.peak_bytes is None


def test_steps_that_were_done_before_the_time_was_over_are_kept():
    found = row([*BUILT, *STEPS[:2]], LATE)
    assert found.summary is not None
    assert (found.summary.n, found.summary.std_s) == (1, None)


@pytest.mark.parametrize("name", ["gpt-nano", "vgg11"])
def test_work_is_three_forwards_but_for_what_has_no_gradient_of_its_inputs(name):
    cases = [Case(name, pass_name, "fp32") for pass_name in ("forward", "backward", "step")]
    rows = [judged(settings(), case, [], DONE, size=size_of(settings(), case)) for case in cases]
    work = {each.pass_name: each.flops for each in rows}
    assert work["step"] == work["backward"]
    assert 2.5 < work["backward"] / work["forward"] < 3.0


def test_a_row_is_refused_when_what_it_must_hold_is_more_than_it_may():
    from muster.jobs.models.anatomy import anatomy

    xl = anatomy(GPT_SHAPES["gpt-xl"])
    fields = {"precision": "fp32", "recompute": False, "allowed": 20 * GB}
    assert refusal(xl, 1, pass_name="forward", **fields) is None
    assert refusal(xl, 1, pass_name="step", **fields) == (
        "needs 22.0 GB for weights, gradients and moments and 0.7 GB for activations, but only 20.0 GB may be "
        "used here; use a smaller batch or model"
    )
    vgg = anatomy(VGG_SHAPES["vgg11"])
    assert "for activations" in str(refusal(vgg, 1 << 20, pass_name="forward", **fields))
    assert refusal(vgg, 1 << 20, pass_name="forward", **{**fields, "recompute": True}) is None
