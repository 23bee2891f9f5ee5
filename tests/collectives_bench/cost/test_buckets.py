"""Buckets: torch's own rule, the simulation against drawn time lines, and the closed forms."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.collectives_bench.cost import buckets
from muster.collectives_bench.cost.buckets import MB, CurvePoint, Lanes, PredictedBucket
from muster.ddp.buckets import ALONE_BYTES, GradientSize, plan_buckets
from muster.jobs.basics.errors import UsageError
from muster.jobs.models.anatomy import anatomy
from muster.jobs.models.shapes import GPT_SHAPES, VGG_SHAPES, GptShape, VggShape
from muster.jobs.spec.train_fields import ModelSettings
from muster.jobs.train.models import build_model

ALPHA, RATE = 0.5e-3, 1.25e9


def line(nbytes: int) -> float:
    return ALPHA + nbytes / RATE


@settings(max_examples=30)
@given(st.lists(st.integers(1, 9 * MB), min_size=1, max_size=40))
def test_torch_buckets_are_those_that_torch_makes(sizes):
    tensors = [torch.empty(size, dtype=torch.uint8, device="meta") for size in sizes]
    wanted, _ = dist._compute_bucket_assignment_by_size(tensors, [buckets.TORCH_FIRST, buckets.TORCH_BUCKET])
    made = buckets.as_torch([PredictedBucket(size, 0.0) for size in sizes])
    assert [each.nbytes for each in made] == [sum(sizes[index] for index in bucket) for bucket in wanted]


def test_vgg_11_has_three_buckets_in_torch():
    made = buckets.as_torch(buckets.gradients_of(anatomy(VGG_SHAPES["vgg11"]), 4, 1.0))
    assert [round(each.nbytes / 1e6, 1) for each in made] == [9.5, 27.2, 0.3]
    assert made[-1].ready_s == 1.0


def test_buckets_of_at_most_a_size_keep_the_order_and_give_a_large_gradient_one_of_its_own():
    gradients = [PredictedBucket(size, when) for when, size in enumerate((3, 3, 9, 2, 2, 2, 2), start=1)]
    assert buckets.at_most(gradients, 6) == [
        PredictedBucket(6, 2),
        PredictedBucket(9, 3),
        PredictedBucket(6, 6),
        PredictedBucket(2, 7),
    ]


@pytest.mark.parametrize("bucket_mb", [0.0, 0.5, 4.5, 25.0, None])
@pytest.mark.parametrize("model", ["vgg11", "gpt-nano", "gpt-micro"])
@pytest.mark.parametrize(("device", "alone"), [("cpu", ALONE_BYTES), ("cuda", None)])
def test_buckets_of_ours_are_those_that_the_wrapper_makes(model, bucket_mb, device, alone):
    shape = {**VGG_SHAPES, **GPT_SHAPES}[model]
    vocabulary = VggShape.classes if model in VGG_SHAPES else GptShape.vocabulary
    module = build_model(ModelSettings(name=model), vocabulary=vocabulary, seed=0)
    sizes = [GradientSize(each.numel(), 4) for each in module.parameters()]
    wanted = [sum(sizes[place].bytes for place in bucket) for bucket in plan_buckets(sizes, bucket_mb, alone)]
    gradients = buckets.registered(anatomy(shape), 4, 1.0)
    alone = buckets.OWN_ALONE if device == "cpu" else None
    made = buckets.as_ours(gradients, None if bucket_mb is None else int(bucket_mb * MB), alone=alone)
    assert [each.nbytes for each in made] == wanted
    assert made[-1].ready_s == 1.0
    assert [each.ready_s for each in made] == sorted(each.ready_s for each in made)


def test_a_bucket_of_ours_waits_for_its_last_gradient_and_for_those_before_it():
    gradients = [PredictedBucket(size, when) for size, when in ((1, 2.0), (3, 1.0), (3, 5.0), (2, 4.0), (9, 3.0))]
    assert buckets.as_ours(gradients, 6, first=2) == [
        PredictedBucket(1, 2.0),
        PredictedBucket(6, 5.0),
        PredictedBucket(2, 5.0),
        PredictedBucket(9, 5.0),
    ]
    assert buckets.as_ours(gradients, 18, first=2) == [PredictedBucket(18, 5.0)]
    assert buckets.as_ours(gradients, None, first=2) == [PredictedBucket(18, 5.0)]


def test_a_large_gradient_of_ours_goes_by_itself_where_there_are_several_buckets_and_the_others_go_on_without_it():
    gradients = [PredictedBucket(size, when) for when, size in enumerate((1, 9, 3, 9, 2), start=1)]
    assert buckets.as_ours(gradients, 10, first=2, alone=9) == [
        PredictedBucket(9, 2),
        PredictedBucket(9, 4),
        PredictedBucket(6, 5),
    ]
    assert buckets.as_ours(gradients, 24, first=2, alone=9) == [PredictedBucket(24, 5)]


def test_with_everything_ready_at_once_and_one_stream_the_closed_form_holds():
    for count in (1, 4, 16):
        total = 64 * MB
        # Its overhead leaves out what no number of buckets changes: the transfer of all buckets but the last.
        made = [PredictedBucket(total // count, 0.0)] * count
        hidden_s = (total - total // count) / RATE
        overhead_s = total / (RATE * count) + count * ALPHA
        assert buckets.finish_s(made, line, Lanes(1)) - hidden_s == pytest.approx(overhead_s)


def test_the_simulation_finds_the_optimum_of_the_communication_bound_form():
    total, backward_s, alpha = 64 * MB, 50e-3, 0.305e-3  # measured: best at 4 MB; M sqrt(alpha / T_b) is 5.0 MB
    points = buckets.curve(
        [PredictedBucket(total // 64, backward_s * part / 64) for part in range(1, 65)],
        lambda nbytes: alpha + nbytes / 1.31e9,
        Lanes(1),
        [count * MB for count in (1, 2, 4, 8, 16, 32, 64)],
        buckets.at_most,
    )
    measured_ms = (69, 59, 57, 61, 66, 80, 101)
    assert [1e3 * point.step_s for point in points] == pytest.approx(measured_ms, rel=0.12)
    assert buckets.choose(points, 0.03).best.bucket_bytes == 4 * MB


def test_a_choice_is_clear_only_when_its_margin_passes_the_error():
    points = [CurvePoint(MB, 64, 1.05, 0.0), CurvePoint(4 * MB, 16, 1.0, 0.0), CurvePoint(25 * MB, 3, 1.3, 0.0)]
    near = buckets.choose(points, 0.10)
    assert (near.best.bucket_bytes, near.is_clear) == (4 * MB, False)
    assert near.margin == pytest.approx(0.05)
    assert near.torch_margin == pytest.approx(0.3)
    assert buckets.choose(points, 0.03).is_clear


def test_sizes_that_make_the_same_buckets_are_no_rivals():
    points = [CurvePoint(32 * MB, 1, 1.0, 0.0), CurvePoint(64 * MB, 1, 1.0, 0.0)]
    only = buckets.choose(points, 0.1)
    assert (only.best.bucket_bytes, only.runner_up, only.margin) == (32 * MB, None, 0.0)


def test_sizes_that_cannot_be_are_refused():
    with pytest.raises(UsageError, match="one or more positive sizes"):
        buckets.curve([PredictedBucket(1, 0.0)], float, Lanes(1), [])
