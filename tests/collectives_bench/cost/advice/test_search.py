"""The search over all splits: what is tried, that pruning loses nothing, and that answers change as they must."""

import itertools
import time
from dataclasses import replace

import pytest

from muster.collectives_bench.cost import profile
from muster.collectives_bench.cost.advice import search
from muster.collectives_bench.cost.advice.measured import LayerTimes, PassTimes, RealSteps, UpdateTime
from muster.collectives_bench.cost.advice.pipelines import PipelineTask, alone, shared
from muster.collectives_bench.cost.advice.plans import SplitLimits, SplitPlan, every_plan
from muster.collectives_bench.cost.advice.site import JobSite, KnownNetwork, NoNetwork
from muster.collectives_bench.cost.advice.steptime import calibrated, least_s, measured_error, price
from muster.collectives_bench.cost.load import RankLoad, Recipe
from muster.jobs.models.anatomy import anatomy
from muster.jobs.models.counted import CountedAnatomy, CountedPart, CountedTensor
from muster.jobs.models.shapes import GPT_SHAPES

MICRO = GPT_SHAPES["gpt-micro"]


def allows(plan: SplitPlan) -> str:
    return ""


def site(
    ranks: int = 4, *, rate: float = 100e6, sharing: int = 1, model: str = "gpt-micro", batch: int = 16
) -> JobSite:
    """Ranks with a core each; a pass takes 20 ms per sample forward and 40 ms backward."""
    load = RankLoad(anatomy(GPT_SHAPES[model]), Recipe(4, 4, 8), ranks, batch, 8, 4)
    passes = [
        PassTimes(samples=samples, active=active, forward_s=0.02 * samples * slow, backward_s=0.04 * samples * slow)
        for samples in (1, 16)
        for active, slow in ((1, 1.0), (4, 2.0))[: 1 + (sharing > 1)]
    ]
    times = LayerTimes(cores=2, ranks=sharing, passes=passes, updates=[UpdateTime(active=1, seconds=0.01)])
    return JobSite(load, times, KnownNetwork(profile.link(rate)), ranks, sharing)


def limits(ranks: int = 4, batch: int = 16) -> SplitLimits:
    return SplitLimits(ranks, batch, MICRO.layers + 3, [2, 4], context=MICRO.context)


def test_every_product_of_degrees_is_tried_once() -> None:
    plans = list(every_plan(limits(8)))
    assert len(set(plans)) == len(plans)
    assert all(plan.ranks == 8 for plan in plans)
    degrees = {(plan.data, plan.pipe, plan.tensor) for plan in plans}
    assert degrees == {
        (data, pipe, tensor)
        for data, pipe, tensor in itertools.product((1, 2, 4, 8), repeat=3)
        if data * pipe * tensor == 8 and tensor <= 4 and pipe <= MICRO.layers + 3
    }
    assert list(every_plan(limits(1))) == [SplitPlan()]


def test_a_plan_is_a_mode_or_a_product_in_the_job_file() -> None:
    assert SplitPlan(data=4, averaging="bucketed", bucket_bytes=2**20).changes() == {
        "parallel": None,
        "microbatches": None,
        "bucket_size_mb": 1.0,
        "mode": "bucketed",
    }
    product = SplitPlan(2, 2, 1, "zero1", "1f1b", 8)
    assert product.text == "data 2 by zero1 x pipe 2 by 1f1b, 8 micro-batches"
    assert product.changes()["parallel"] == {
        "data": 2,
        "pipe": 2,
        "schedule": "1f1b",
        "microbatches": 8,
        "zero": 1,
    }
    sliced = SplitPlan(pipe=4, schedule="terapipe", microbatches=2)
    assert sliced.text == "terapipe, 2 micro-batches of 4 slices"
    assert sliced.changes() == {"mode": "terapipe", "microbatches": 2, "parallel": None}


@pytest.mark.parametrize("rate", [10e6, 100e6, 1e9, 100e9])
@pytest.mark.parametrize("sharing", [1, 4])
def test_the_search_finds_the_best_of_all_plans_and_no_bound_is_above_a_price(rate: float, sharing: int) -> None:
    here = site(rate=rate, sharing=sharing)
    prices = {plan: price(plan, here).seconds for plan in every_plan(limits())}
    assert all(least_s(plan, here) <= seconds for plan, seconds in prices.items())
    found = search.advise(here, limits(), check=allows)
    assert found.best is not None
    assert found.best.step is not None
    assert found.best.step.seconds == pytest.approx(min(prices.values()))
    assert found.considered == len(prices)


def test_a_slow_network_favours_pipelines_and_a_fast_one_data_parallel_ranks() -> None:
    slow = search.advise(site(rate=20e6), limits(), check=allows).best
    fast = search.advise(site(rate=100e9), limits(), check=allows).best
    assert slow is not None
    assert slow.plan.pipe == 4
    assert fast is not None
    assert fast.plan.data == 4
    here = site(rate=100e6)
    middle = search.advise(here, limits(), check=allows).best
    assert middle is not None
    told = search.changes(here, limits(), middle.plan, allows, None)
    assert any(each["if"].startswith("a network") for each in told)


def test_memory_and_the_jobs_other_settings_exclude_plans() -> None:
    here = site(rate=100e9)
    whole = search.advise(here, limits(), check=allows).best
    assert whole is not None
    assert whole.memory is not None
    tight = search.advise(here, limits(), check=allows, memory_limit=0.6 * whole.memory.total).best
    assert tight is not None
    assert tight.plan != whole.plan
    refused = search.advise(here, limits(), check=lambda plan: "" if plan.pipe == 4 else "no")
    assert refused.best is not None
    assert refused.best.plan.pipe == 4
    assert search.advise(here, limits(), check=lambda plan: "no").best is None


def test_equal_plans_have_no_clear_winner() -> None:
    here = site(rate=100e9)
    assert not search.advise(here, limits(), check=lambda plan: "" if plan.zero in (1, 2) else "no").is_clear


def test_an_error_on_a_measured_pipeline_widens_the_intervals() -> None:
    here = site(sharing=4)
    plan, step = SplitPlan(pipe=4, schedule="1f1b", microbatches=4), {"mode": "1f1b", "microbatches": 4, "samples": 1}
    exact_s = price(plan, replace(here, load=replace(here.load, batch=4), network=NoNetwork())).seconds
    times = here.times.model_copy(update={"steps": [RealSteps(**step, seconds=exact_s / 1.2, host_s=0, cpu_s=0)]})  # type: ignore[arg-type]
    row, priced = replace(here, times=times, parts={}), price(plan, here)
    assert calibrated(row).paces == pytest.approx((1.0, 1 / 1.2))
    assert calibrated(replace(row, sharing=1)).paces == (1.0, 1.0)
    found, before = search.interval(plan, priced, row), search.interval(plan, priced, here)
    assert measured_error(row, "") == pytest.approx(0.2)
    assert measured_error(row, "zero1") == pytest.approx(
        0.2
    )  # the largest of all steps, because no step of this kind was measured
    assert found.high_s - before.high_s == pytest.approx(0.2 * (priced.seconds - priced.communication - priced.data))


def test_a_gpu_hides_the_hosts_work_unless_it_takes_longer_than_the_step() -> None:
    here = replace(site(), load=replace(site().load, backend="nccl"))
    times = {"device": "cuda", "host": [0.001, 0.001, 0.001], "data_s": 0.01}
    fast = replace(here, times=here.times.model_copy(update=times))
    slow = replace(here, times=here.times.model_copy(update={**times, "host": [1.0, 2.0, 1.0]}))
    plan = SplitPlan(4, averaging="flat")
    assert price(plan, fast).seconds == pytest.approx(price(plan, here).seconds)
    assert price(plan, slow).seconds == pytest.approx(4.0 + 4 * 0.01)


def test_the_best_bucket_is_the_fastest_size() -> None:
    here = site(rate=200e6)
    row = search.judged(plan := SplitPlan(4, averaging="bucketed"), price(plan, here), here, allows, None)
    best, curve = search.best_bucket(row, here)
    assert best.step is not None
    assert best.step.seconds <= min(seconds for _, seconds in curve) * 1.03


def test_slices_shorten_the_ramp_and_cost_a_message_each() -> None:
    """The ramp is p - 1 slices and messages each way; stages differ a little, so it is not quite a quarter."""
    here = site(rate=1e15)
    plans = [SplitPlan(pipe=4, schedule=name, microbatches=1) for name in ("gpipe", "terapipe")]
    whole, sliced = (price(plan, here) for plan in plans)
    assert (whole.bubble + whole.communication) / (sliced.bubble + sliced.communication) == pytest.approx(4, rel=0.2)
    late = replace(here, network=KnownNetwork(profile.link(1e15, 0.05)))
    assert price(plans[0], late).seconds - whole.seconds < price(plans[1], late).seconds - sliced.seconds


def test_messages_without_pauses_are_as_slow_as_the_link() -> None:
    """A shaped link sends the first bytes after a pause at once: here half of each message."""
    task = PipelineTask("gpipe", 2, 8, (0.001, 0.001), (0.001, 0.001), (0.01,))
    steady = replace(task, ahead=(0.01,))
    assert shared(task, lambda count: 1.0).seconds == pytest.approx(2 * (8 * 0.01 + 0.002), rel=0.1)
    assert shared(steady, lambda count: 1.0).seconds == pytest.approx(2 * (8 * 0.02 - 0.01 + 0.002), rel=0.1)


def test_a_pipeline_on_shared_cores_takes_as_long_as_all_its_work() -> None:
    task = PipelineTask("1f1b", 4, 8, (0.01,) * 4, (0.02,) * 4, (0.0,) * 3)
    assert shared(task, lambda count: 1.0).seconds == pytest.approx(alone(task).seconds)
    one_core = shared(task, float).seconds
    assert one_core == pytest.approx(4 * 8 * 0.03)
    assert alone(task).seconds < shared(task, lambda count: max(count / 2, 1.0)).seconds < one_core


def test_many_microbatches_are_extended_from_few() -> None:
    from muster.pipe.schedules.tables import schedule
    from muster.pipe.schedules.times import times

    task = PipelineTask("1f1b", 4, 64, (0.01, 0.02, 0.01, 0.01), (0.02, 0.03, 0.02, 0.02), (0.001,) * 3)
    whole = times((0, 1, 2, 3), schedule("1f1b", 4, 64).actions, task.costs())
    assert alone(task).seconds == pytest.approx(max(row[-1][1] for row in whole.actions), rel=0.01)


def test_a_users_model_whose_layers_are_counted_is_priced_in_every_mode() -> None:
    parts = tuple(
        CountedPart(name, f"{name}.linear", (CountedTensor(f"{name}.w", (64, 64), trained=name != "a"),), flops, 64)
        for name, flops in (("a", 100), ("b", 300), ("c", 0), ("d", 100))
    )
    model = CountedAnatomy("made", parts)
    assert [(tensor.name, share) for tensor, share in model.ready()] == [("d.w", 0.2), ("c.w", 0.2), ("b.w", 0.8)]
    here = replace(site(), load=replace(site().load, model=model))
    found = search.advise(here, SplitLimits(4, 16, 4), check=allows)
    assert found.best is not None
    assert {row.plan.averaging for row in found.rows} >= {"flat", "bucketed", "ddp", "zero3", "fsdp"}


def test_groups_of_several_ranks_on_a_node_share_its_link() -> None:
    alone_there = replace(site(8), nodes=8)
    crowded = replace(site(8), nodes=2)
    assert (alone_there.nodes_of(4, 2), alone_there.groups_on_link(4, 2)) == (4, 1)
    assert (crowded.nodes_of(4, 2), crowded.groups_on_link(4, 2)) == (2, 2)
    assert (crowded.nodes_of(4, 1), crowded.groups_on_link(4, 1)) == (1, 1)


@pytest.mark.slow
def test_a_thousand_ranks_are_searched_completely() -> None:
    shape = GPT_SHAPES["gpt-2.7b"]
    load = RankLoad(anatomy(shape), Recipe(4, 4, 8), 1024, 4096, 8, 2, "nccl")
    passes = [PassTimes(samples=n, active=1, forward_s=0.03 + 0.01 * n, backward_s=0.05 + 0.02 * n) for n in (1, 4)]
    times = LayerTimes(device="cuda", cores=96, ranks=8, passes=passes, updates=[UpdateTime(active=1, seconds=0.01)])
    there = JobSite(load, times, KnownNetwork(profile.link(100e9, 5e-6)), 128, 8)
    began = time.process_time()
    found = search.advise(
        there, SplitLimits(1024, 4096, shape.layers + 3, [2, 4, 8, 16, 32], context=shape.context), check=allows
    )
    print(f"{found.considered} plans in {time.process_time() - began:.1f} s")
    assert found.considered > 3000
    assert found.best is not None
