"""A pipeline trains like a loop over micro-batches in one process, bit for bit."""

import pytest

from muster.jobs.world.world import World
from support.pipelines import Case, wrong_training

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

EXACT = {"exact": True}
CASES = {
    1: [
        Case("vgg", "gpipe", 4, (9, 3)),
        Case("gpt tied", "1f1b", 3, (8, 5), {"recompute": True}),
        Case("odd", "interleaved", 2, (8, 5)),
        Case("odd", "model", 1),
    ],
    2: [
        Case("vgg", "1f1b", 8, (11, 8, 3)),
        Case("vgg16", "1f1b", 4, (5,)),
        Case("vgg", "interleaved", 4, (9, 9)),
        Case("gpt", "1f1b", 1),
        Case("gpt", "gpipe", 5, (11, 4)),
        Case("gpt", "zbv", 4, (9, 8), EXACT),
        Case("gpt tied", "1f1b", 4, (9, 2), EXACT),
        Case("vgg", "zb1p", 4, (9, 8), EXACT),
        Case("odd", "1f1b", 3, (7, 2, 7), {"cuts": (0, 6)}),
        Case("odd", "gpipe", 3, (7, 1, 7), {"cuts": (0, 2)}),
        Case("odd", "interleaved", 2, (3, 3), {"cuts": (0, 5, 6, 8)}),
        Case("odd", "1f1b", 3, (3, 3), {"cuts": (0, 9), "recompute": True}),
        Case("odd", "gpipe", 3, (3, 3), {"cuts": (0, 5), "recompute": True}),
        Case("ends", "interleaved", 4, (5, 4), {"cuts": (0, 2, 3, 9)}),
        Case("ends", "1f1b", 2, (4, 4), {"cuts": (0, 1), "recompute": True}),
    ],
    3: [
        Case("vgg", "gpipe", 2, (5, 4), {"recompute": True}),
        Case("gpt", "1f1b", 7, (9, 7), {"recompute": True}),
        Case("gpt", "model", 2, (3, 4)),
        Case("odd", "1f1b", 5, (9, 2, 9), {"cuts": (0, 1, 7)}),
        Case("odd", "interleaved", 6, (9, 7), {"recompute": True}),
        Case("vgg", "zb1p", 2, (5, 4), {**EXACT, "recompute": True}),
        Case("ends", "gpipe", 3, (7, 4), {"cuts": (0, 5, 6)}),
        Case("ends", "zb1p", 3, (7, 4), {**EXACT, "cuts": (0, 2, 6)}),
    ],
    4: [
        Case("vgg", "1f1b", 8, (10, 8)),
        Case("vgg", "1f1b", 2, (10, 1), {"recompute": True}),
        Case("gpt", "interleaved", 4, (5, 4), {"cuts": (0, 1, 2, 3), "recompute": True}, chunks=1),
        Case("odd", "interleaved", 8, (9, 7, 2)),
        Case("odd", "gpipe", 6, (7, 6)),
        Case("vgg", "zbv", 8, (9, 8), EXACT),
        Case("odd", "model", 3, (4, 4)),
    ],
}


def wrong(world: World) -> list[str]:
    return [f"{case}: {each}" for case in CASES[world.size] for each in wrong_training(world, case)]


@pytest.mark.parametrize("ranks", CASES)
def test_every_schedule_trains_as_a_loop_in_one_process(on_ranks, ranks):
    assert on_ranks(ranks, wrong) == [[]] * ranks
