from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from muster.jobs.spec.train import TrainSettings
from muster.jobs.train.data.sampling import Plan, part, plan_of, total_steps


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    samples = draw(st.integers(1, 400))
    return Plan(
        samples=samples,
        batch_size=draw(st.integers(1, samples)),
        virtual_ranks=draw(st.integers(1, 9)),
        accumulation=draw(st.integers(1, 5)),
        seed=draw(st.integers(0, 1000)),
    )


def shards_of(plan: Plan, step: int):
    batch = plan.batch(step)
    return batch, [plan.shard(batch, virtual_rank) for virtual_rank in range(plan.virtual_ranks)]


@given(plans(), st.integers(0, 3))
def test_an_epoch_sees_every_sample_exactly_once_and_no_two_ranks_share_one(plan: Plan, epoch: int):
    order = plan.order(epoch).tolist()
    seen: Counter[int] = Counter()
    for step in range(epoch * plan.steps_per_epoch, (epoch + 1) * plan.steps_per_epoch):
        batch, shards = shards_of(plan, step)
        assert batch.epoch == epoch
        for shard in shards:
            for micro in shard.micro_batches:
                seen.update(order[micro.start : micro.start + micro.samples])
    assert seen == Counter(range(plan.samples))


@given(plans(), st.integers(0, 50))
def test_shards_and_micro_batches_differ_by_at_most_one_sample_larger_first(plan: Plan, step: int):
    batch, shards = shards_of(plan, step)
    sizes = [shard.samples for shard in shards]
    assert sum(sizes) == batch.samples
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1
    for shard in shards:
        pieces = [micro.samples for micro in shard.micro_batches]
        assert pieces == sorted(pieces, reverse=True)
        assert pieces[0] - pieces[-1] <= 1
        assert len(pieces) == min(plan.accumulation, sizes[0]), "as many on all ranks: they may communicate in each"


@given(plans(), st.integers(0, 50))
def test_an_empty_micro_batch_repeats_one_sample_with_weight_zero_and_is_never_shard_0s(plan: Plan, step: int):
    batch, shards = shards_of(plan, step)
    for shard in shards:
        for micro in shard.micro_batches:
            assert batch.start <= micro.start < micro.stop <= batch.stop
            if micro.samples == 0:
                assert (micro.stop - micro.start, micro.weight) == (1, 0.0)
                assert shard.virtual_rank > 0
            else:
                assert micro.stop - micro.start == micro.samples


@given(plans(), st.integers(0, 50))
def test_weights_make_the_mean_over_virtual_ranks_the_mean_over_the_batch(plan: Plan, step: int):
    batch, shards = shards_of(plan, step)
    for shard in shards:
        for micro in shard.micro_batches:
            share = micro.weight / plan.virtual_ranks  # of this micro-batch's mean in the mean over the batch
            assert abs(share - micro.samples / batch.samples) < 1e-12


@given(st.integers(1, 8), st.integers(1, 20), st.integers(0, 50))
def test_equal_shards_have_weight_exactly_one(virtual_ranks: int, each: int, step: int):
    plan = Plan(samples=1000 * virtual_ranks * each, batch_size=virtual_ranks * each, virtual_ranks=virtual_ranks)
    _, shards = shards_of(plan, step)
    assert [micro.weight for shard in shards for micro in shard.micro_batches] == [1.0] * virtual_ranks


@given(st.integers(0, 100), st.integers(0, 300), st.integers(1, 20))
def test_parts_cover_a_range_without_gap_or_overlap(start: int, length: int, parts: int):
    cut = [part(start, start + length, parts, index) for index in range(parts)]
    assert [number for low, high in cut for number in range(low, high)] == list(range(start, start + length))


def test_cifar10_at_256_has_196_steps_an_epoch():
    settings = TrainSettings.model_validate({"model": "vgg11", "data": "cifar10", "batch_size": 256, "epochs": 2})
    plan = plan_of(settings, samples=50_000, world_size=3)
    assert (plan.steps_per_epoch, plan.batch(195).samples, total_steps(settings, plan)) == (196, 80, 392)


def test_without_epochs_or_steps_a_job_trains_one_epoch():
    settings = TrainSettings.model_validate({"model": "vgg11", "data": "digits", "batch_size": 64})
    plan = plan_of(settings, samples=1437, world_size=2)
    assert total_steps(settings, plan) == 23


@given(plans())
def test_two_epochs_have_two_orders_and_an_order_is_the_same_when_asked_again(plan: Plan):
    assert plan.order(1).tolist() == plan.order(1).tolist()
    if plan.samples > 20:
        assert plan.order(0).tolist() != plan.order(1).tolist()
