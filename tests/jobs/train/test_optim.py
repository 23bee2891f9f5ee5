from itertools import pairwise

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from muster.jobs.spec.train_fields import OptimizerSettings, ScheduleSettings
from muster.jobs.train.numerics.optim import build_optimizer, learning_rate


def rates(steps: int, **schedule) -> list[float]:
    settings = ScheduleSettings(**schedule)
    return [round(learning_rate(settings, 1.0, step, steps), 6) for step in range(steps)]


# Drawn by hand from the definition: warm-up reaches the peak at its last step, the last step has the final value.
@pytest.mark.parametrize(
    ("schedule", "wanted"),
    [
        ({"name": "constant"}, [1, 1, 1, 1, 1]),
        ({"name": "constant", "warmup_steps": 4}, [0.25, 0.5, 0.75, 1, 1]),
        ({"name": "linear"}, [1, 0.75, 0.5, 0.25, 0]),
        ({"name": "linear", "final": 0.2}, [1, 0.8, 0.6, 0.4, 0.2]),
        ({"name": "linear", "warmup_steps": 2}, [0.5, 1, 1, 0.5, 0]),
        ({"name": "cosine"}, [1, 0.853553, 0.5, 0.146447, 0]),
        ({"name": "cosine", "warmup_steps": 2, "final": 0.5}, [0.5, 1, 1, 0.75, 0.5]),
        ({"name": "cosine", "warmup_steps": 5}, [0.2, 0.4, 0.6, 0.8, 1]),
        ({"name": "linear", "warmup_steps": 4}, [0.25, 0.5, 0.75, 1, 1]),
    ],
)
def test_a_schedule_gives_the_rates_of_its_table(schedule, wanted):
    assert rates(5, **schedule) == wanted


@example("linear", 0, 0.1, 1)  # rounding once passed the peak by one bit
@given(st.sampled_from(["constant", "linear", "cosine"]), st.integers(0, 30), st.floats(0.0, 1.0), st.integers(1, 60))
def test_a_rate_never_leaves_zero_to_peak_and_never_rises_after_the_warm_up(name, warmup, final, steps):
    settings = ScheduleSettings(name=name, warmup_steps=warmup, final=final)
    values = [learning_rate(settings, 0.3, step, steps) for step in range(steps)]
    assert all(0.0 <= value <= 0.3 for value in values)
    after = values[warmup:]
    assert all(later <= earlier + 1e-15 for earlier, later in pairwise(after))


@pytest.mark.parametrize(
    ("settings", "plain"),
    [
        (
            OptimizerSettings(name="sgd", lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01, foreach=False),
        ),
        (
            OptimizerSettings(name="adamw", lr=0.01, betas=[0.8, 0.9], eps=1e-6, weight_decay=0.1),
            lambda p: torch.optim.AdamW(p, lr=0.01, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1, foreach=False),
        ),
    ],
    ids=["sgd", "adamw"],
)
def test_the_fused_optimizer_steps_as_the_plain_one_and_leaves_frozen_parameters(settings, plain):
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(5, 3, generator=generator), torch.randn(7, generator=generator)]
    ours, theirs = ([nn.Parameter(each.clone()) for each in start] for _ in range(2))
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    optimizer, reference = build_optimizer([*ours, frozen], settings), plain(theirs)
    for _ in range(3):
        for mine, other in zip(ours, theirs, strict=True):
            mine.grad = torch.randn(mine.shape, generator=generator)
            other.grad = mine.grad.clone()
        optimizer.step()
        reference.step()
    assert optimizer.defaults["fused"]
    assert frozen.tolist() == [1.0, 1.0]
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-6)
