"""Steps of a sharded wrapper equal those of one process, in all stages, on 1 to 4 ranks, for any module."""

from dataclasses import replace
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import nn

from muster.jobs.world.world import World
from muster.zero import ShardedDataParallel
from support.sharded import Run, wrong_training

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

EXACT = {"exact": True}


def wrong_runs(world: World, runs: list[dict]) -> list[str]:
    problems = []
    for given in runs:
        run = Run(**given)
        problems += [f"{run}: {each}" for each in wrong_training(world, run)]
    return problems


# With exact sums the bits are those of one process, clipped or not, and virtual shards are added in a fixed order.
EVERYWHERE = [
    {"case": "ragged", "how": "adamw", "shards": 2, "clip": 0.1, "settings": EXACT},
    {"case": "ragged", "how": "sgd", "groups": True, "clip": 0.1},
    {"case": "masters", "how": "adamw", "steps": 2},
]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_stage_trains_as_one_process(on_ranks, world_size):
    runs = [{**run, "stage": stage} for stage, run in product((1, 2, 3), EVERYWHERE)]
    assert on_ranks(world_size, wrong_runs, runs=runs) == [[]] * world_size


LARGER = {"bucket_size_mb": 16 / 1024}
ONCE = [
    {"case": "ragged", "how": "adamw", "groups": True, "settings": EXACT},
    {"case": "gpt", "how": "adamw fused", "units": ("block1", "block2"), "settings": {**EXACT, **LARGER}},
    {"case": "masters", "how": "adamw", "clip": 0.5, "settings": EXACT},
    {"case": "never used", "how": "sgd", "shards": 2, "settings": EXACT},
    {"case": "tiny", "how": "sgd", "settings": {"bucket_size_mb": 0.0}},
    {"case": "double", "how": "adamw"},
    {"case": "masters", "how": "sgd", "shards": 2},
    {"case": "unused in odd shards", "how": "adamw"},
    {"case": "never used", "how": "adamw"},
    {"case": "vgg11", "how": "sgd", "steps": 2, "settings": {"bucket_size_mb": 1.0}},
    {"case": "odd", "how": "sgd", "settings": {"communication_dtype": "bfloat16"}},
    {"case": "ragged", "how": "adamw", "shards": 2, "settings": {"accumulate": "sharded"}},
    {"case": "recomputed", "how": "adamw", "shards": 2, "settings": {"bucket_size_mb": None}},
]


LATE = [
    {"case": "ragged", "how": "adamw", "shards": 2, "clip": 0.1, "settings": EXACT},
    {"case": "gpt", "how": "adamw fused", "units": ("block1", "block2"), "settings": {**EXACT, **LARGER}},
    {"case": "masters", "how": "adamw", "steps": 2},
]


def test_parameters_that_are_gathered_with_the_next_forward_train_as_one_process_too(on_ranks):
    runs = [{**run, "stage": stage, "late": True} for stage, run in product((1, 2), LATE)]
    assert on_ranks(2, wrong_runs, runs=runs) == [[]] * 2


def read_late(world: World) -> list[bool]:
    """Step shards as a replayed graph does, without the wrapper: whoever reads a parameter gets the new values."""
    torch.manual_seed(1)
    model = ShardedDataParallel(nn.Linear(5, 3), world.group, stage=1)
    model.gather_late()
    found = []
    for value in (2.0, 3.0):
        for each in model.flat_parameters:
            each.shard.fill_(value)
        model.shards_changed()
        model.shards_changed()  # nobody has read the parameters in between
        found.append(all(bool((each == value).all()) for each in model.module.parameters()))
    return found


def test_whoever_reads_parameters_after_a_replay_gets_gathered_ones(on_ranks):
    assert on_ranks(2, read_late) == [[True, True]] * 2


def test_other_modules_and_settings_train_as_one_process_too(on_ranks):
    runs = [{**run, "stage": stage} for stage, run in product((1, 2), ONCE)]
    assert on_ranks(3, wrong_runs, runs=runs) == [[]] * 3


def in_a_part_of_the_world(world: World) -> list[str]:
    ranks = [1, 3]
    group = dist.new_group(ranks)
    problems = []
    if world.rank in ranks:
        part = replace(world, rank=ranks.index(world.rank), size=2, group=group)
        for stage in (1, 2, 3):
            problems += wrong_training(part, Run("ragged", "adamw", stage, settings=EXACT))
    dist.barrier()
    return problems


def test_a_sub_group_trains_by_itself(on_ranks):
    assert on_ranks(4, in_a_part_of_the_world) == [[]] * 4
