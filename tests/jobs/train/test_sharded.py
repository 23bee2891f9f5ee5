"""State that ranks share out: the same bits as one process has, whatever the stage and the number of ranks."""

import pytest
import torch

from muster.jobs.basics.errors import RefusedError
from muster.jobs.checkpoint.pieces import Piece
from muster.jobs.models.anatomy import anatomy
from muster.jobs.models.shapes import POOL, VGG_SHAPES, GptShape, VggShape
from muster.jobs.spec.train import TrainSettings
from muster.jobs.spec.train_fields import OptimizerSettings
from muster.jobs.tensors.parts import whole_part
from muster.jobs.train.data import open_data
from muster.jobs.train.data.loading import move
from muster.jobs.train.models.gpt import build_gpt
from muster.jobs.train.models.units import of_one_dtype, own_units
from muster.jobs.train.models.vgg import build_vgg
from muster.jobs.train.numerics.optim import build_optimizer
from muster.jobs.train.parallel.forms import Forms
from muster.jobs.train.parallel.state import ModelState
from muster.jobs.train.trainer import build_trainer
from muster.jobs.train.verify import digest
from muster.jobs.world.world import World
from muster.zero.flat import ParameterRange
from support.held import held_state

pytestmark = pytest.mark.slow

TINY_VGG = VggShape("vgg-tiny", (8, POOL, 8, POOL, 15, POOL, 16, POOL, 17, POOL))  # odd sizes too
SGD = {"name": "sgd", "lr": 0.05, "momentum": 0.9, "weight_decay": 1e-4}
VGG = {"model": "vgg-tiny", "data": "digits", "batch_size": 50, "optimizer": SGD}
MODEL = {"d_model": 12, "d_ff": 20, "layers": 2, "heads": 2, "context": 7, "bias": True, "norm": "layer"}
ADAMW = {"name": "adamw", "lr": 1e-2, "weight_decay": 0.1}
GPT = {"model": {**MODEL, "dropout": 0.1}, "data": "synthetic", "batch_size": 25, "optimizer": ADAMW}
EXACT = {"exact": True, "virtual_ranks": 12, "grad_accumulation": 2, "clip_norm": 0.2, "bucket_size_mb": 0.01}


def trained(world: World, modes: list[str]) -> dict[str, dict[str, str]]:
    """Train both models in each mode for two steps; return the sha256 of all parameters and buffers of each."""
    VGG_SHAPES["vgg-tiny"] = TINY_VGG
    found = {}
    for job in (VGG, GPT):
        for mode in modes:
            settings = TrainSettings.model_validate({**job, **EXACT, "mode": mode})
            trainer = build_trainer(settings, open_data(settings), world)
            steps = trainer.own_steps()
            for step in range(2):
                trainer.clock.start()
                trainer.engine.train_step(step, move(steps[step], world.device, trainer.dtype).shards)
            trainer.engine.model.synchronize_buffers()
            hashes = {name: digest(each).hex() for name, each in trainer.engine.model.full_state().items()}
            found[f"{mode} {settings.optimizer.name}"] = hashes
    return found


@pytest.mark.ranks
def test_exact_has_the_same_bits_in_every_stage_on_one_to_four_ranks_with_clipping(on_ranks):
    # AdamW with dropout, SGD with momentum and batch norm; two micro-batches of a sample or two.
    stages = ["zero1", "zero2", "zero3"]
    on = {1: ["bucketed", *stages], 2: ["zero3"], 3: stages, 4: ["zero1", "zero3"]}
    found = {size: on_ranks(size, trained, modes=each) for size, each in on.items()}
    alone = found[1][0]
    for size, ranks in found.items():
        for rank, weights in enumerate(ranks):
            for name, hashes in weights.items():
                wanted = alone[f"bucketed {name.split()[1]}"]
                assert [each for each in wanted if hashes[each] != wanted[each]] == [], f"{name}, rank {rank} of {size}"


def weights_after(world: World, trains: list[dict], steps: int) -> list[dict[str, list[float]]]:
    """Train each job for some steps; return its parameters."""
    found = []
    for train in trains:
        settings = TrainSettings.model_validate(train)
        trainer = build_trainer(settings, open_data(settings), world)
        batches = trainer.own_steps()
        for step in range(steps):
            trainer.engine.train_step(step, move(batches[step], world.device, trainer.dtype).shards)
        found.append({name: each.flatten().tolist() for name, each in trainer.engine.model.full_state().items()})
    return found


@pytest.mark.ranks
def test_a_last_batch_that_ranks_share_unevenly_has_as_many_micro_batches_on_all(on_ranks, tmp_path):
    # An epoch of 37 windows ends with 5: three samples for one rank, two for the other. Where ranks communicate in
    # every micro-batch, the first one waited for ever in its third.
    path = tmp_path / "text"
    path.write_text("she sells sea shells by the sea shore; " * 17)
    model = {"d_model": 16, "d_ff": 32, "layers": 1, "heads": 2, "context": 16}
    job = {"model": model, "data": {"text": str(path)}, "batch_size": 32, "grad_accumulation": 3, "precision": "fp64"}
    shared = [{"mode": "zero3"}, {"mode": "fsdp"}, {"mode": "zero2", "accumulate": "sharded"}]
    found = on_ranks(2, weights_after, trains=[{**job, **each} for each in shared], steps=2)
    (alone,) = on_ranks(1, weights_after, trains=[{**job, "mode": "bucketed"}], steps=2)[0]
    for rank in found:
        for weights in rank:
            for name, values in alone.items():
                assert weights[name] == pytest.approx(values, rel=1e-12, abs=1e-14), name


def models() -> list[tuple[torch.nn.Module, VggShape | GptShape]]:
    gpt = GptShape("gpt", layers=3, heads=2, d_model=8, d_ff=16, context=4, vocabulary=11)
    return [(build_gpt(gpt, 0), gpt), (build_vgg(TINY_VGG, 0), TINY_VGG)]


def test_units_are_those_of_the_cost_model_and_each_runs_in_turn():
    for model, shape in models():
        names = {id(each): name for name, each in model.named_parameters()}
        found = [[names[id(each)] for module in unit for each in module.parameters()] for unit in own_units(model)]
        wanted = [[tensor.name for part in unit for tensor in part.tensors] for unit in anatomy(shape).units()]
        assert found == (wanted[1:] if isinstance(shape, GptShape) else wanted), "around the blocks is the root unit"


def test_a_unit_is_cut_where_the_type_changes():
    conv, norm = torch.nn.Conv2d(1, 1, 1).bfloat16(), torch.nn.BatchNorm2d(1)
    assert of_one_dtype((conv, norm)) == [(conv,), (norm,)]
    assert of_one_dtype((conv.float(), norm)) == [(conv, norm)]


def shared(rank: int) -> tuple[ModelState, dict[str, Piece]]:
    """Share a small model out to two ranks by hand; also return what is stored of it."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    forms = Forms(model)
    optimizer = build_optimizer(model.parameters(), OptimizerSettings(name="adamw"))
    step = torch.zeros(())

    def held() -> list[ParameterRange]:
        start, stop = ((0, 4), (4, 6))[rank]
        ours = [
            ParameterRange("0.weight", key, (2, 3), start, stop, torch.full((stop - start,), 1.0))
            for key in (None, "exp_avg")
        ]
        ours.append(ParameterRange("0.weight", "step", (), 0, 1, step, answers=rank == 0))
        whole = ("0.bias", "1.weight", "1.bias") if rank else ()
        return [*ours, *(ParameterRange(name, None, (2,), 0, 2, torch.zeros(2)) for name in whole)]

    more = {"scaling/scale": torch.tensor(2.0)}
    state = held_state(model, optimizer, rank=rank, ranks=2, more=more, held=held)
    pieces = list(forms.pieces.values())
    pieces += [whole_part(f"model/{name}", buffer).piece for name, buffer in model.named_buffers()]
    pieces += [whole_part("optimizer/0.weight/exp_avg", torch.zeros(2, 3)).piece]
    pieces += [whole_part("optimizer/0.weight/step", step).piece]
    return state, {piece.name: piece for piece in pieces}


def test_ranges_are_saved_once_and_what_every_rank_has_by_rank_0():
    saved = [{part.piece.key for part in shared(rank)[0].parts()} for rank in (0, 1)]
    buffers = {f"model/1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}
    assert saved[0] == {
        *("model/0.weight[flat 0:4]", "optimizer/0.weight/exp_avg[flat 0:4]", "optimizer/0.weight/step"),
        *("scaling/scale", *buffers),
    }
    assert saved[1] == {
        *("model/0.weight[flat 4:6]", "optimizer/0.weight/exp_avg[flat 4:6]"),
        *("model/0.bias", "model/1.weight", "model/1.bias"),
    }


def test_every_rank_reads_its_ranges_the_numbers_that_are_one_for_all_and_what_is_stored_of_the_rest():
    state, stored = shared(1)
    found = {part.piece.key for part in state.wanted(stored)}
    assert {"model/0.weight[flat 4:6]", "optimizer/0.weight/step", "model/1.running_mean"} <= found
    assert "scaling/scale" not in found
    scale = whole_part("scaling/scale", torch.tensor(1.0)).piece
    assert "scaling/scale" in {part.piece.key for part in state.wanted({**stored, scale.name: scale})}
    del stored["optimizer/0.weight/exp_avg"]
    assert not any("exp_avg" in part.piece.key for part in state.wanted(stored))


@pytest.mark.parametrize("rank", [0, 1])  # the weights of the norm are rank 1's alone
@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("model/1.weight", torch.zeros(3), r"model/1.weight is F32 \[3\] there, but F32 \[2\] in this job"),
        ("model/1.weight", None, "1.weight is not in the checkpoint"),
        ("model/2.weight", torch.zeros(2), "2.weight is only in the checkpoint"),
        ("optimizer/2.weight/exp_avg", torch.zeros(2), "it has exp_avg of 2.weight"),
    ],
)
def test_another_model_is_refused_on_every_rank_whatever_it_holds(rank, name, tensor, message):
    state, stored = shared(rank)
    stored.pop(name, None)
    if tensor is not None:
        stored[name] = whole_part(name, tensor).piece
    with pytest.raises(RefusedError, match=message):
        state.wanted(stored)
