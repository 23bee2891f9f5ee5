"""Memory of a rank: known answers of papers and courses, and what each mode adds."""

from dataclasses import replace
from typing import get_args

import pytest

from muster.collectives_bench.cost.load import SIZES, RankLoad, Recipe, Split
from muster.collectives_bench.cost.memory import PeakMemory, memories_of, memory_of, states
from muster.collectives_bench.cost.modes import WAYS
from muster.jobs.models.anatomy import anatomy, saved_bytes
from muster.jobs.models.shapes import GPT_SHAPES, VGG_SHAPES
from muster.jobs.spec.train_fields import Precision

TEN_BILLION = 10e9
SGD, MIXED_ADAM = Recipe(4, 4, 0), Recipe(2, 2, 12, 4)


def load(model: str = "vgg11", ranks: int = 4, **more) -> RankLoad:
    shape = {**VGG_SHAPES, **GPT_SHAPES}[model]
    values = {"recipe": SGD, "ranks": ranks, "batch": 64, "microbatches": 8, "itemsize": 4, **more}
    return RankLoad(anatomy(shape), **values)


def memory(name: str, of: RankLoad) -> PeakMemory:
    found = memory_of(WAYS[name], of)
    assert found is not None
    return found


def memories(name: str, of: RankLoad) -> list[PeakMemory]:
    found = memories_of(WAYS[name], of)
    assert found is not None
    return found


def test_zero_states_of_ten_billion_parameters_on_eight_workers():
    # fp16 parameters and gradients, three fp32 states: 160, 55, 37.5, 20 GB
    found = [states(TEN_BILLION, MIXED_ADAM, zero=stage, ranks=8).states for stage in range(4)]
    assert found == [160e9, 55e9, 37.5e9, 20e9]


@pytest.mark.parametrize("ranks", [1, 2, 64])
def test_mixed_precision_adam_is_16_p_then_4_p_and_12_p_by_n_then_2_p_and_14_p_by_n_then_16_p_by_n(ranks):
    p = 7.5e9
    found = [states(p, MIXED_ADAM, zero=stage, ranks=ranks).states for stage in range(4)]
    assert found == pytest.approx([16 * p, 4 * p + 12 * p / ranks, 2 * p + 14 * p / ranks, 16 * p / ranks])


@pytest.mark.parametrize(("workers", "bits"), [(2, 32), (8, 16)])
def test_the_formulas_of_a_course_with_adam_as_three_states(workers, bits):
    p, each = 1e9, bits // 8
    recipe = Recipe(each, each, 3 * each)
    found = [states(p, recipe, zero=stage, ranks=workers).states for stage in range(4)]
    in_ps = [value * 8 / (p * bits) for value in found]
    assert in_ps == pytest.approx([5, 2 + 3 / workers, 1 + 4 / workers, 5 / workers])


def test_all_workers_together_hold_w_p_times_2_and_k_by_s_and_640_gb_in_the_known_case():
    assert 8 * states(1e6, Recipe(4, 4, 4 * 1)).states == 8 * 1e6 * (2 + 1) * 32 / 8
    in_all = 8 * states(TEN_BILLION, Recipe(2, 2, 4)).states  # SGD with momentum, fp16 with an fp32 state
    assert in_all == 640e9


def test_recipes_of_jobs_have_two_states_for_adamw_and_one_for_momentum():
    assert Recipe.of("adamw", momentum=False) == Recipe(4, 4, 8)
    assert Recipe.of("sgd", momentum=True) == Recipe(4, 4, 4)
    assert Recipe.of("sgd", momentum=False, precision="fp64") == Recipe(8, 8, 0)
    assert Recipe.of("adamw", momentum=False, precision="bf16") == Recipe(4, 4, 8)  # autocast keeps weights as they are
    assert Recipe.of("adamw", momentum=False, precision="pure_bf16") == MIXED_ADAM


def test_every_precision_of_a_job_has_its_sizes():
    assert set(SIZES) == set(get_args(Precision))


def test_a_block_of_ours_keeps_what_the_papers_does_without_the_square_and_dropout():
    model = anatomy(GPT_SHAPES["gpt-small"])
    block = next(parts for name, parts in model.layers() if name == "block1")
    ours = sum(part.saved * 2 + part.saved_bytes for part in block)
    paper = 128 * 768 * 34  # s b h (34 + 5 a s / h) without the square (Korthikanti et al. 2022, table 2)
    assert ours == pytest.approx(paper, rel=0.1)


def test_a_data_parallel_rank_holds_all_states_and_its_part_of_the_batch():
    of = load()
    alone, shared = memory("single", of), memory("allreduce", of)
    assert shared.states == alone.states == 8 * of.model.elements
    assert shared.activations == alone.activations / 4


def test_rank_0_of_gather_scatter_holds_n_times_the_largest_gradient_twice():
    largest = 512 * 512 * 9 * 4
    of = load()
    assert memory("gather_scatter", of).communication == pytest.approx(largest * (3 + 4 * 2.01))


def test_flat_holds_a_copy_of_all_gradients():
    of = load()
    assert memory("flat", of).communication - memory("allreduce", of).communication > 0.9 * of.model.elements * 4


def test_a_bucket_copies_small_gradients_one_by_one_on_a_cpu_and_on_a_gpu_only_to_cast_them():
    sizes = [4 * tensor.elements for tensor in load("gpt-small").model.tensors]
    small = max(size for size in sizes if size < 4 * 2**20)
    on_cpu = memory("bucketed", load("gpt-small", bucket_bytes=256 * 2**20)).communication
    assert on_cpu == pytest.approx(small + 2 * 0.04 * 256 * 2**20)
    assert memory("bucketed", load("gpt-small", backend="nccl")).communication == 0
    for bucket_bytes, coming in ((2**20, max(sizes)), (256 * 2**20, 256 * 2**20)):
        of = load("gpt-small", backend="nccl", bucket_bytes=bucket_bytes, sent=2)
        assert memory("bucketed", of).communication == coming + sum(sizes) / 2


def test_gradients_sent_in_another_type_are_held_in_it_too():
    for name in ("flat", "overlap", "bucketed"):
        more = memory(name, load(sent=2)).communication - memory(name, load()).communication
        assert more == 2 * load().model.elements
    assert memory("flat", load(sent=4)) == memory("flat", load())


def test_nccl_hides_nothing_that_is_counted():
    assert memory("allreduce", load(backend="nccl")).communication == 0


@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3", "fsdp"])
def test_a_higher_stage_of_zero_holds_less_states(name):
    of = load("gpt-small", recipe=Recipe(4, 4, 8))
    stage = WAYS[name].zero
    assert memory(name, of).states == states(of.model.elements, of.recipe, zero=stage, ranks=4).states
    assert memory("zero3", of).total < memory("zero2", of).total < memory("ddp", of).total


def test_the_xl_of_a_course_in_fp32_on_two_ranks_shards_11_gib_of_adamws_states_to_half():
    elements = anatomy(replace(GPT_SHAPES["gpt-xl"], vocabulary=10_000)).elements
    whole, sharded = (states(elements, Recipe.of("adamw", momentum=False), zero=zero, ranks=2) for zero in (0, 1))
    found = [value / 2**30 for value in (whole.parameters, whole.gradients, whole.optimizer, sharded.optimizer)]
    assert found == pytest.approx([5.55, 5.55, 11.1, 5.55], abs=0.01)


def test_16_bit_gradients_are_stepped_as_float32_ones_of_what_a_rank_steps():
    of = load("gpt-small", recipe=MIXED_ADAM, itemsize=2)
    p = of.model.elements
    assert memory("fsdp", of).states == pytest.approx(16 * p / 4)
    assert memory("zero3", of).states == pytest.approx(14 * p / 4)
    assert memory("zero3", of).stepping == pytest.approx(4 * p / 4)
    assert memory("bucketed", of).stepping == 4 * p


def test_gradients_that_add_up_whole_are_counted_and_those_that_are_shared_out_at_once_are_not():
    for name in ("zero2", "zero3", "fsdp"):
        once, local, sharded = (
            memory(name, load("gpt-small", **more))
            for more in ({}, {"accumulation": 4}, {"accumulation": 4, "accumulate": "sharded"})
        )
        assert local.gradients == sharded.gradients == once.gradients
        assert sharded.communication == once.communication
        assert local.communication > once.communication + 0.5 * 4 * load("gpt-small").model.elements
    one = load("gpt-small", accumulation=4, bucket_bytes=2**20)
    assert memory("zero1", one).communication == memory("zero1", load("gpt-small", bucket_bytes=2**20)).communication


def test_stage_2_passes_gradients_through_a_bucket_and_two_flat_ones():
    of = load("gpt-small", bucket_bytes=25 * 2**20, backend="nccl")
    assert memory("zero2", of).communication == 3 * 25 * 2**20
    everything = load("gpt-small", bucket_bytes=None, backend="nccl")
    assert memory("zero2", everything).communication == 2 * 4 * of.model.elements


def test_stage_3_gathers_what_lies_around_the_blocks_a_block_and_the_next_one():
    of = load("gpt-small", backend="nccl")
    around, block = (256 + 128 + 1) * 768, 4 * 768**2 + 2 * 768 * 3072 + 2 * 768
    assert memory("zero3", of).communication == 4 * (around + 2 * block) + 4 * 3 * block
    kept = load("gpt-small", backend="nccl", reshard=False)
    assert memory("zero3", kept).communication - memory("zero3", of).communication == 4 * 10 * block


def test_recomputed_blocks_keep_their_inputs_and_one_block_at_work():
    of = load("gpt-small", ranks=1, batch=1)
    blocks = [parts for name, parts in of.model.layers() if name.startswith("block")]
    one, wide = saved_bytes(blocks[0], 4), 4 * 128 * 768
    whole = memory("single", of).activations
    again = memory("single", load("gpt-small", ranks=1, batch=1, recompute=True)).activations
    assert whole - again == 12 * one - (12 * wide + one)
    vgg, less = (memory("single", load(ranks=1, batch=1, recompute=each)).activations for each in (False, True))
    assert 0.4 * vgg < less < 0.8 * vgg
    staged = {each: memory("gpipe", load("gpt-small", recompute=each)).activations for each in (False, True)}
    assert staged[True] < 0.5 * staged[False]


def test_activations_are_those_of_one_forward_and_exact_shards_keep_their_gradients_apart():
    of = load(batch=64)
    assert memory("bucketed", load(batch=64, accumulation=4)).activations == memory("bucketed", of).activations / 4
    exact = load(batch=64, shards=8)
    assert memory("bucketed", exact).activations == memory("bucketed", of).activations / 2
    more = memory("bucketed", exact).communication - memory("bucketed", of).communication
    assert more == 4 * of.model.elements


def test_what_batch_norms_record_stays_in_32_bits():
    norms = 8
    assert memory("single", load(recipe=MIXED_ADAM, itemsize=2)).buffers == 4 * load().model.buffers + 8 * norms
    assert memory("single", load(recipe=Recipe(8, 8, 0))).buffers == 8 * load().model.buffers + 8 * norms
    assert memory("single", load("gpt-nano")).buffers == 0


def test_micro_batches_held_are_all_in_gpipe_and_as_many_as_stages_in_1f1b():
    of = load("gpt-small", batch=64, microbatches=16)
    held = {name: memory(name, of).activations for name in ("gpipe", "1f1b", "interleaved", "zbv")}
    assert held["1f1b"] < 0.4 * held["gpipe"]
    assert held["1f1b"] < held["interleaved"] < held["gpipe"]


def test_tensor_ranks_hold_a_part_of_the_matrices_and_norms_in_full():
    of = load("gpt-small")
    split, whole = memory("tensor", of), memory("single", of)
    norms, positions = 25 * 768, of.model.tokens * 768
    assert split.parameters == whole.parameters / 4 + 4 * (norms + positions) * 3 / 4
    assert whole.activations / 4 < split.activations < 0.6 * whole.activations


def test_pipelines_beside_each_other_share_out_the_batch_and_what_zero_says():
    of = load("gpt-small", batch=64, recipe=Recipe(4, 4, 8))
    split = Split(data=2, pipe=2)
    one, two = memories("1f1b", replace(of, split=split))
    assert one.parameters + two.parameters == 4 * (of.model.elements + 256 * 768), "the head has the embedding's copy"
    alone = memories("1f1b", replace(of, ranks=2, split=Split(pipe=2)))
    assert [each.activations for each in alone] == [2 * one.activations, 2 * two.activations]
    assert one.communication > alone[0].communication / 2, "and what it averages with"
    sharded = memories("1f1b", replace(of, split=replace(split, zero=2)))
    assert [(each.parameters, 2 * each.gradients, 2 * each.optimizer) for each in sharded] == [
        (each.parameters, each.gradients, each.optimizer) for each in (one, two)
    ]


def test_a_stage_holds_messages_of_its_own_boundaries_and_what_it_is_given_once():
    of = load("gpt-small", ranks=4, microbatches=8)
    wide = 4 * 128 * 768 * 8  # one micro-batch's activation: 8 samples
    found = [each.communication / wide for each in memories("1f1b", of)]
    assert found == [3, 5, 5, 2], "of the last stage neither logits nor what comes after it"
    on_gpus = [each.communication / wide for each in memories("1f1b", replace(of, backend="nccl"))]
    assert on_gpus == [2, 3, 3, 1]
    vgg = load("vgg11", ranks=2, microbatches=8, batch=8)
    names = [name for name, _ in vgg.model.layers()]
    at_conv, at_norm = (replace(vgg, split=Split(pipe=2, stages=(tuple(names[:n]), tuple(names[n:])))) for n in (4, 5))
    of_conv, of_norm = (memories("1f1b", each)[1].activations for each in (at_conv, at_norm))
    pooled = 4 * 64 * 16 * 16
    assert of_conv - of_norm == pooled, "a convolution does not count the input that a pool before it counts"


def test_pipelines_forward_whole_stages_again():
    of = load("gpt-small", ranks=2, microbatches=8, batch=8)
    first, again = (memories("gpipe", replace(of, recompute=each))[0].activations for each in (False, True))
    stage = [parts for name, parts in of.model.layers() if name in {"embed", *(f"block{n}" for n in range(1, 7))}]
    kept = sum(saved_bytes(parts, 4) for parts in stage)
    assert first - again == 7 * kept, "of 8 micro-batches one is there"


def test_a_gradient_is_there_twice_where_several_backwards_add_up():
    of = load("gpt-small")
    largest = max(of.gradient_sizes)
    assert memory("bucketed", of).adding == 0
    assert memory("bucketed", replace(of, accumulation=2)).adding == largest
    assert memory("zero2", replace(of, accumulation=2, accumulate="sharded")).adding == 0
    assert memory("gpipe", of).adding == largest
    assert memory("model", of).adding == 0


def test_stages_are_those_that_a_job_has_cut():
    of = load("vgg11", ranks=2)
    names = [name for name, _ in of.model.layers()]
    for cut in (4, 9):
        split = Split(pipe=2, stages=(tuple(names[:cut]), tuple(names[cut:])))
        first, last = memories("gpipe", replace(of, split=split))
        elements = sum(t.elements for part in of.model.parts if part.layer in names[:cut] for t in part.tensors)
        assert first.parameters == 4 * elements
        assert first.parameters + last.parameters == 4 * of.model.elements
        assert first.buffers + last.buffers == memory("single", of).buffers


@pytest.mark.parametrize(("zero", "sync"), [(0, "bucketed"), (0, "flat"), (1, "sharded"), (2, "sharded")])
def test_a_stage_without_parameters_has_activations_only(zero, sync):
    names = [name for name, _ in load().model.layers()]
    cuts = tuple(map(tuple, (names[:2], names[2:4], names[4:])))  # relu1 and pool1 by themselves
    of = load(ranks=6, split=Split(data=2, pipe=3, zero=zero, sync=sync, stages=cuts))
    middle = memories("1f1b", of)[1]
    assert middle.states == middle.buffers == middle.adding == 0
    assert middle.activations > 0
    assert middle.communication == 4 * 4 * (2 * 64 * 32**2 + 3 * 64 * 16**2), "messages of 4 samples, and no bucket"


def test_what_cannot_be_split_has_no_memory():
    assert memory_of(WAYS["tensor"], load("vgg11")) is None
    assert memory_of(WAYS["zbv"], load("gpt-nano", ranks=4)) is None
