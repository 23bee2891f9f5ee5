"""Steps: what is exposed in each mode, on a network whose times are known, and the choice among modes."""

from dataclasses import dataclass, replace

import pytest

from muster.collectives_bench.cost import profile, steps
from muster.collectives_bench.cost.buckets import registered
from muster.collectives_bench.cost.exposed import Compute, own_buckets
from muster.collectives_bench.cost.load import RankLoad, Recipe
from muster.collectives_bench.cost.modes import WAYS, cut, ways
from muster.collectives_bench.cost.steps import ModePrediction, PredictedTime
from muster.jobs.basics.errors import RefusedError
from muster.jobs.models.anatomy import anatomy
from muster.jobs.models.shapes import GPT_SHAPES, VGG_SHAPES

GBIT = 1e9
VGG = RankLoad(anatomy(VGG_SHAPES["vgg11"]), Recipe(4, 4, 0), ranks=4, batch=64, microbatches=8, itemsize=4)
GPT = replace(VGG, model=anatomy(GPT_SHAPES["gpt-small"]), recipe=Recipe(4, 4, 8))
BYTES = VGG.model.elements * 4
RING_S = 2 * 3 / 4 * BYTES * 8 / GBIT
LINK = profile.link(GBIT)
COMPUTE = Compute(0.1, 0.2, 0.01)


@dataclass(frozen=True)
class Knows:
    """A network that knows the link's times of some operations, within ten per cent."""

    operations: tuple[str, ...]
    asked: list

    def predict(self, operation, nbytes, *, ranks, nodes=1, backend=None, back_to_back=False):
        if operation not in self.operations:
            raise RefusedError(f"{operation} was not measured")
        self.asked.append((operation, nbytes, ranks, back_to_back))
        seconds = LINK.predict(operation, nbytes, ranks=ranks, nodes=nodes).seconds
        return profile.Prediction(seconds, 0.9 * seconds, 1.1 * seconds, "known")


def row(name: str, load: RankLoad = VGG, compute: Compute | None = COMPUTE, network=LINK) -> ModePrediction:
    (found,) = steps.predict(ways([name]), load, compute, network, load.ranks)
    return found


def exposed(name: str, load: RankLoad = VGG, compute: Compute | None = COMPUTE) -> float:
    span = row(name, load, compute).exposed
    assert span is not None
    return span.seconds


def test_the_known_answer_of_a_ring_all_reduce_10_billion_fp16_gradients_on_8_ranks_at_100_gbit():
    assert profile.link(100e9).predict("all_reduce", 20e9, ranks=8).seconds == pytest.approx(2.8)


def test_a_single_rank_waits_for_nobody_and_computes_the_whole_batch():
    found = row("single")
    assert found.exposed == PredictedTime(0.0, 0.0, 0.0)
    assert found.compute_s == pytest.approx(4 * 0.3 + 0.01)


@pytest.mark.parametrize("name", [name for name, way in WAYS.items() if way.family in ("single", "data")])
def test_one_rank_exposes_nothing_in_any_mode(name):
    assert exposed(name, replace(VGG, ranks=1)) == 0.0


def test_gather_scatter_sends_n_minus_1_times_all_gradients_each_way_through_one_link():
    link_s = 2 * 3 * BYTES * 8 / GBIT
    assert exposed("gather_scatter") == pytest.approx(link_s + 7 * BYTES * 0.42e-9)
    assert link_s == pytest.approx(1.772, abs=0.001)


def test_all_reduces_after_the_backward_are_exposed_in_full():
    assert exposed("allreduce") == pytest.approx(RING_S + 2 * BYTES / 4e9)
    assert exposed("flat") == pytest.approx(RING_S + 2 * BYTES / 4e9)


def test_latency_counts_once_a_gradient():
    slow = profile.link(GBIT, 1e-3)
    found = row("allreduce", network=slow).exposed
    assert found is not None
    assert found.seconds - exposed("allreduce") == pytest.approx(34 * 2 * 3 * 1e-3)  # 34 tensors, 2 (n - 1) messages


@pytest.mark.parametrize("name", ["overlap", "bucketed", "ddp"])
def test_what_is_sent_during_the_backward_is_hidden(name):
    small = replace(VGG, bucket_bytes=2**20)  # of the mode that takes a size: its last bucket is the tail
    assert exposed(name, small, Compute(0.1, 100.0)) < 0.1 * RING_S
    assert exposed(name, compute=Compute(0.1, 1e-9)) == pytest.approx(RING_S, rel=1e-3)
    # In a step that waits for the network only what is ready early helps.
    assert RING_S - 0.2 <= exposed(name) <= RING_S


def test_zero_gathers_what_it_has_scattered():
    assert exposed("zero1", compute=Compute(0.1, 1e-9)) == pytest.approx(RING_S, rel=1e-3)
    assert exposed("zero1") == exposed("zero2")


def test_fully_sharded_training_moves_half_as_much_again():
    at_once = exposed("zero3", compute=Compute(0.0, 0.0))
    units = [sum(tensor.elements for part in unit for tensor in part.tensors) for unit in VGG.model.units()]
    not_twice = units[-1] * 4 * 3 / 4 * 8 / GBIT  # the last unit stays from forward to backward
    assert at_once == pytest.approx(1.5 * RING_S - not_twice, rel=1e-6)


def test_a_long_computation_hides_all_but_the_first_and_the_last_exchange_of_fully_sharded_training():
    long = exposed("zero3", GPT, Compute(100.0, 200.0))
    nbytes = 4 * sum(tensor.elements for part in GPT.model.units()[0] for tensor in part.tensors)
    assert long == pytest.approx(2 * 3 / 4 * nbytes * 8 / GBIT, rel=1e-6)


def test_a_pipeline_computes_longer_by_what_it_idles():
    found = row("1f1b", GPT, Compute(0.1, 0.2))
    assert found.compute_s is not None
    # 12 blocks and the head on 4 ranks are not quite even.
    assert 0.3 / (1 - 3 / 11) < found.compute_s < 1.1 * (0.3 / (1 - 3 / 11)) + 0.01
    idle = 1 - 0.3 / found.compute_s
    assert f"idle {100 * idle:.1f} %, 8 micro-batches" in found.notes


def test_stages_one_after_another_take_as_long_as_one_process_however_uneven_they_are():
    stages = cut(VGG.model, WAYS["model"].schedule, 4)
    work = [stage.flops for stage in stages]
    assert max(work) > 1.2 * sum(work) / 4  # uneven indeed
    passes_s = 4 * 0.3  # of the whole batch on one rank: every rank of four computes 0.3 s for a quarter of it
    assert row("model", VGG, Compute(0.1, 0.2)).compute_s == pytest.approx(passes_s)
    slowest_s = passes_s * max(work) / sum(work)
    piped = row("gpipe", VGG, Compute(0.1, 0.2)).compute_s
    assert piped == pytest.approx((passes_s + 7 * slowest_s) / 8)  # 8 micro-batches: one passes all stages, 7 wait


def test_messages_of_a_pipeline_are_exposed_in_its_ramps():
    boundary_s = 8 * 128 * 768 * 4 * 8 / GBIT  # 8 samples of a micro-batch
    assert exposed("gpipe", GPT, Compute(10.0, 10.0)) == pytest.approx(2 * 3 * boundary_s)
    assert exposed("model", GPT, Compute(10.0, 10.0)) == pytest.approx(2 * 3 * 8 * boundary_s)
    assert exposed("zbv", GPT, Compute(10.0, 10.0)) == pytest.approx(2 * 2 * 3 * boundary_s)  # there and back


def test_tensor_parallel_has_four_all_reduces_a_block_and_those_of_embedding_head_and_cross_entropy():
    stream, loss = 64 * 128 * 768 * 4, 64 * 128 * 3 * 4
    assert exposed("tensor", GPT) == pytest.approx(2 * 3 / 4 * (50 * stream + loss) * 8 / GBIT)


def test_without_compute_times_there_is_no_step_and_nothing_is_chosen():
    rows = list(steps.predict(ways(), VGG, None, LINK, 4))
    assert {found.step for found in rows} == {None}
    assert steps.rank(rows) is None
    assert all(found.memory for found in rows if found.way.family == "data")


def test_what_a_model_cannot_be_cut_into_says_why():
    assert row("ddp").notes == ()
    assert row("tensor").notes[-1] == "vgg11 has no width to split"
    assert not row("tensor").fits
    nano = replace(GPT, model=anatomy(GPT_SHAPES["gpt-nano"]), ranks=8)
    assert row("gpipe", nano).notes[-1] == "gpt-nano has too few layers"


def test_an_operation_that_was_not_measured_leaves_its_modes_without_a_step():
    network = Knows(("all_reduce", "ring_reduce_scatter", "all_gather"), [])
    missing = row("gather_scatter", network=network)
    assert (missing.step, missing.notes) == (None, ("gather_scatter was not measured",))
    assert row("allreduce", network=network).step is not None
    assert row("zero1", network=network).step is not None  # one way to reduce and scatter is enough


def test_intervals_are_those_of_the_network():
    found = row("flat", network=Knows(("all_reduce",), [])).exposed
    assert found is not None
    copies = 2 * BYTES / 4e9
    assert [found.low_s - copies, found.high_s - copies] == pytest.approx([0.9 * RING_S, 1.1 * RING_S])


def test_exchanges_without_a_pause_are_asked_for_as_such():
    asked: list = []
    row("allreduce", network=Knows(("all_reduce",), asked))
    assert {back_to_back for *_, back_to_back in asked} == {True}
    assert sorted({nbytes for _, nbytes, *_ in asked})[-1] == 512 * 512 * 9 * 4


def test_the_fastest_mode_that_fits_is_chosen_and_a_margin_inside_the_intervals_is_no_win():
    network = Knows(("all_reduce", "gather_scatter"), [])
    rows = list(steps.predict(ways(["gather_scatter", "allreduce", "flat"]), VGG, COMPUTE, network, 4))
    chosen = steps.rank(rows)
    assert chosen is not None
    assert chosen.runner_up is not None
    assert (chosen.best.way.name, chosen.runner_up.way.name, chosen.is_clear) == ("allreduce", "flat", False)
    clear = steps.rank([each for each in rows if each.way.name != "flat"])
    assert clear is not None
    assert clear.is_clear
    assert clear.margin > 1


def test_a_mode_may_fill_nine_tenths_of_the_memory():
    found = row("allreduce")
    assert found.memory is not None
    assert steps.with_limit(found, found.memory.total / 0.9 + 1).counts
    tight = steps.with_limit(found, found.memory.total)
    assert not tight.counts
    assert tight.notes[-1] == "does not fit"
    assert steps.rank([tight]) is None


def test_every_mode_has_a_prediction_for_a_gpt():
    rows = list(steps.predict(ways(), GPT, COMPUTE, LINK, 4))
    assert [found.way.name for found in rows if found.step is None] == []
    assert [found.way.name for found in rows] == list(WAYS)


def test_gradients_sent_in_half_the_bytes_take_half_the_time_in_the_same_buckets():
    at_once, half = Compute(0.1, 1e-9), replace(VGG, sent=2)
    for name in ("gather_scatter", "allreduce", "flat", "overlap", "bucketed"):
        network_s = [exposed(name, each, at_once) for each in (VGG, half)]
        copies_s = {"gather_scatter": 7 * BYTES * 0.42e-9, "allreduce": BYTES / 2e9, "flat": BYTES / 2e9}.get(name, 0.0)
        assert network_s[1] - copies_s / 2 == pytest.approx((network_s[0] - copies_s) / 2, rel=1e-2)
    assert exposed("ddp", half, at_once) == exposed("ddp", VGG, at_once)


def test_a_gpu_deals_large_gradients_to_buckets_too():
    gradients = registered(VGG.model, 4, 1.0)
    on_cpu, on_gpu = (own_buckets(replace(VGG, backend=name))(gradients, VGG.bucket_bytes) for name in ("gloo", "nccl"))
    assert [round(each.nbytes / 1e6, 1) for each in on_cpu] == [9.4, 9.4, 9.4, 4.7, 3.9]
    assert [round(each.nbytes / 1e6, 1) for each in on_gpu] == [0.0, 18.9, 18.0]
