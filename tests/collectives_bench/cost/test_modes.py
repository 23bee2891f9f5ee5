"""The table of modes: every mode of the design, its idle shares and cuts."""

import pytest

from muster.collectives_bench.cost.exposed import EXPOSED
from muster.collectives_bench.cost.modes import WAYS, cut, messages, rank_of, ways
from muster.jobs.basics.errors import UsageError
from muster.jobs.models.anatomy import anatomy
from muster.jobs.models.shapes import GPT_SHAPES, VGG_SHAPES
from muster.jobs.spec.modes import MODES

VGG, GPT = anatomy(VGG_SHAPES["vgg11"]), anatomy(GPT_SHAPES["gpt-small"])


def idle(name: str, p: int, m: int) -> float:
    schedule = WAYS[name].schedule
    assert schedule is not None
    return schedule.idle(p, m, schedule.chunks)


def test_every_mode_can_be_predicted_and_every_row_has_its_waiting():
    assert set(MODES) == set(EXPOSED) == set(WAYS)


def test_idle_shares_are_the_known_ones():
    # 4 stages, 8 micro-batches: 27.3 %, 15.8 % with two chunks, 11.1 %, none (facts on splitting the work)
    names = ("gpipe", "1f1b", "interleaved", "zb1p", "zbv")
    shares = [round(100 * idle(name, 4, 8), 1) for name in names]
    assert shares == [27.3, 27.3, 15.8, 11.1, 0.0]
    gained = [(1 - idle("1f1b", 4, 8)) ** -1 * (1 - idle(name, 4, 8)) for name in names[2:]]
    assert [round(each, 3) for each in gained] == [1.158, 1.222, 1.375]
    assert idle("gpipe", 3, 2) == 1 / 2
    assert idle("gpipe", 5, 1) == idle("model", 5, 1) == 4 / 5


@pytest.mark.parametrize("name", [name for name, way in WAYS.items() if way.schedule is not None])
@pytest.mark.parametrize("model", [VGG, GPT], ids=["vgg", "gpt"])
def test_a_cut_gives_every_part_to_one_rank_and_keeps_work_even(name, model):
    schedule = WAYS[name].schedule
    assert schedule is not None
    stages = cut(model, schedule, 4)
    assert stages is not None
    parts = [part.name for stage in stages for part in stage.parts]
    assert sorted(parts) == sorted(part.name for part in model.parts)
    assert all(len(stage.outputs) == schedule.chunks for stage in stages)
    largest = max(sum(part.flops + part.backward_flops for part in layer) for _, layer in model.layers())
    total = sum(stage.flops for stage in stages)
    assert max(stage.flops for stage in stages) <= total / 4 + schedule.chunks * largest


def test_chunks_of_zbv_turn_back_and_those_of_interleaved_begin_again():
    first = {}
    for name in ("interleaved", "zbv"):
        schedule = WAYS[name].schedule
        assert schedule is not None
        stages = cut(VGG, schedule, 2)
        assert stages is not None
        first[name] = [[part.layer for part in stage.parts] for stage in stages]
    assert first["interleaved"][0][0] == first["zbv"][0][0] == "conv1"
    assert first["interleaved"][1][-1] == first["zbv"][0][-1] == "head"


def test_where_the_way_turns_nothing_is_sent():
    wanted = {"1f1b": ([0, 1, 2], 2), "interleaved": ([0, 1, 2, 0, 1, 2], 5), "zbv": ([0, 1, 2, 2, 1, 0], 4)}
    for name, (holders, sent) in wanted.items():
        schedule = WAYS[name].schedule
        assert schedule is not None
        assert [rank_of(chunk, schedule, 3) for chunk in range(3 * schedule.chunks)] == holders
        stages = cut(VGG, schedule, 3)
        assert stages is not None
        assert len(messages(stages, schedule)) == sent


def test_a_model_with_too_few_layers_is_not_cut():
    schedule = WAYS["gpipe"].schedule
    assert schedule is not None
    assert cut(anatomy(GPT_SHAPES["gpt-nano"]), schedule, 6) is None


def test_an_unknown_mode_names_the_nearest():
    with pytest.raises(UsageError, match="did you mean 'zero2'"):
        ways(["zero_2"])
