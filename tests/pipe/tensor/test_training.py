"""A GPT split over ranks trains like one process, with all options and ways to split sequences."""

import pytest

from muster.jobs.world.world import World
from support.tensor_parallel import CASES, wrong_evaluation, wrong_training

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

MIXED = [CASES[0], CASES[5], CASES[10], CASES[3], CASES[7]]  # covers every option and way to split sequences once


def wrong_cases(world: World, mixed: bool) -> list[str]:
    problems = []
    for case in MIXED if mixed else CASES:
        problems += [f"{case}: {each}" for each in wrong_training(world, case)]
    for case in CASES[1::4]:
        problems += [f"{case}: {each}" for each in wrong_evaluation(world, case)]
    return problems


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_a_split_gpt_trains_as_one_process(on_ranks, degree):
    assert on_ranks(degree, wrong_cases, mixed=degree != 2) == [[]] * degree


def wrong_after_many(world: World) -> list[str]:
    return wrong_training(world, CASES[8], steps=6)


def test_many_steps_are_those_of_one_process(on_ranks):
    assert on_ranks(2, wrong_after_many) == [[]] * 2
