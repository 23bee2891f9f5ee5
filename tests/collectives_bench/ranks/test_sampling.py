"""Samples: the slowest rank counts, all ranks stop at the same call, and an interval that is narrow ends a block."""

import time

import pytest
import torch

from muster.collectives_bench.ranks.sampling import CallSampler, ControlGroup, HostClock, Run
from muster.collectives_bench.settings import BenchSettings
from muster.jobs.world.world import World

pytestmark = pytest.mark.ranks


def sampler_of(world: World, **settings) -> tuple[CallSampler, list[int]]:
    beats = [0]

    def beat() -> None:
        beats[0] += 1

    control_group = ControlGroup(world.group, beat)
    return CallSampler(HostClock(control_group, torch.device("cpu")), control_group, BenchSettings(**settings)), beats


def sleep_longer_on_higher_ranks(world: World) -> dict:
    sampler, beats = sampler_of(world, block_s=0.05, least_samples=5, precision=0.0001)

    calls = [0]

    def run() -> None:
        calls[0] += 1
        time.sleep(0.002 * (world.rank + 1))

    first = sampler.first(run)
    samples = sampler.latency(run)
    warm_up, before = sampler.warm_up(run, first), calls[0]
    return {
        "first": first,
        "slowest": samples.slowest,
        "lateness": samples.lateness,
        "warm_up": warm_up,
        "back_to_back": sampler.back_to_back(run, 2000.0),
        "calls": calls[0] - before,
        "host": sampler.host(run),
        "beats": beats[0],
    }


def test_every_rank_sees_the_times_of_the_slowest(on_ranks):
    found = on_ranks(3, sleep_longer_on_higher_ranks)
    for each in found[1:]:
        assert each == found[0]
    (one, *_) = found
    assert one["first"] >= 6000
    assert min(one["slowest"]) >= 6000
    assert len(one["slowest"]) >= 5
    assert one["lateness"][0] < one["lateness"][1] < one["lateness"][2] == 1.0
    assert one["back_to_back"] >= 6000
    assert one["calls"] == 7  # 30 % of 50 ms, in calls of 2 ms
    assert one["warm_up"] >= 2
    assert one["host"] is None
    assert one["beats"] > 2 * len(one["slowest"])


def as_many_as_asked_for(world: World, most: int, block_s: float) -> int:
    sampler, _ = sampler_of(world, block_s=block_s, least_samples=3, most_samples=most, precision=1e-9)
    sampler.first(lambda: None)
    return len(sampler.latency(lambda: None).slowest)


def test_a_block_ends_after_the_most_samples_and_never_before_the_least(on_ranks):
    assert on_ranks(2, as_many_as_asked_for, most=40, block_s=20.0) == [40, 40]
    assert on_ranks(2, as_many_as_asked_for, most=40, block_s=1e-9) == [3, 3]


def steady(world: World) -> int:
    sampler, _ = sampler_of(world, block_s=20.0, least_samples=5, precision=0.9)
    sampler.first(lambda: None)
    return len(sampler.latency(lambda: time.sleep(0.005)).slowest)


def test_a_block_ends_when_its_interval_is_as_narrow_as_asked_for(on_ranks):
    counts = on_ranks(2, steady)
    assert counts[0] == counts[1]
    assert 6 <= counts[0] <= 40


class ToldClock:
    """Calls have taken what the test says; on higher ranks less."""

    pause_s = 0.0

    def __init__(self, rank: int, times_ms: list[float]) -> None:
        self.left_us = [each * 1e3 / (rank + 1) for each in times_ms]

    def loop(self, run: Run, calls: int) -> float:
        run()
        return self.left_us.pop(0)


def warm(world: World, times_ms: list[float]) -> list[int]:
    made: list[int] = []
    clock = ToldClock(world.rank, times_ms)
    sampler = CallSampler(clock, ControlGroup(world.group, lambda: None), BenchSettings())  # type: ignore[arg-type]
    first = sampler.first(lambda: made.append(1))
    return [sampler.warm_up(lambda: made.append(1), first), len(made)]


def test_warming_up_ends_when_two_calls_in_a_row_take_about_as_long_or_its_time_is_over(on_ranks):
    assert on_ranks(2, warm, times_ms=[200, 40, 100, 110, 1]) == [[4, 4]] * 2
    assert on_ranks(2, warm, times_ms=[10, 300, 20, 400, 1]) == [[4, 4]] * 2
