"""Checkpoints of pipelines: whole tensors by the names of the whole model, which every other split reads, too."""

from dataclasses import replace

import pytest
import torch

from muster.jobs.basics.errors import RefusedError
from muster.jobs.basics.files import read_lines
from muster.jobs.checkpoint.pieces import Piece
from muster.jobs.runfolder.rundir import RunDir
from muster.jobs.spec.train_fields import OptimizerSettings
from muster.jobs.train.numerics.optim import build_optimizer
from muster.jobs.train.parallel.forms import Forms
from muster.jobs.train.parallel.state import ModelState
from muster.jobs.train.profiling.clock import PHASES
from muster.jobs.world.world import World
from muster.launch.look.timelines import read_timeline
from support.held import held_state
from support.resuming import GPT, SMALL_GPT, VGG, agree_within_rounding, attempt, hashes

pytestmark = pytest.mark.slow

PRODUCT = {"parallel": {"data": 2, "pipe": 2}}
SHARED = {"parallel": {"data": 2, "pipe": 2, "zero": 1, "schedule": "zbv"}}


def attempts(world: World, ways: list[tuple[str, dict, int | None]], first: int = 0) -> list[int]:
    """Make attempts one after another, each (folder, settings, stop after a step); those of a folder go on.

    `first`: the number of a folder's first attempt here.
    """
    codes, number = [], dict[str, int]()
    for folder, settings, stop_at in ways:
        codes.append(attempt(world, folder, settings, number.setdefault(folder, first), stop_at))
        number[folder] += 1
    return codes


@pytest.mark.ranks
def test_two_resumes_of_a_pipeline_change_no_bit(on_ranks, tmp_path):
    vgg = {**VGG, "mode": "1f1b", "batch_size": 40, "steps": 4}
    jobs = {"buffers": vgg, "dropout": {**GPT, "mode": "zbv", "clip_norm": 0.1, "steps": 4}}
    ways = []
    for name, job in jobs.items():
        ways.append((str(tmp_path / f"{name}-whole"), job, None))
        ways += [(str(tmp_path / f"{name}-parts"), job, stop_at) for stop_at in (1, 3, None)]
    assert on_ranks(2, attempts, ways=ways) == [[0, 75, 75, 0] * 2] * 2
    for name in jobs:
        assert hashes(tmp_path / f"{name}-parts") == hashes(tmp_path / f"{name}-whole"), name


@pytest.mark.ranks
def test_state_moves_between_pipelines_shards_replicas_and_one_process_within_rounding(on_ranks, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    # its output layer shares the weights of the embedding
    job = {**GPT, "model": SMALL_GPT, "precision": "fp64", "clip_norm": 0.5}
    assert on_ranks(1, attempts, ways=[(str(whole), {**job, "mode": "single"}, None)]) == [[0]]
    on_four = [PRODUCT, {"mode": "zero3"}, {"mode": "1f1b"}, SHARED]
    on_two = [{"mode": "interleaved"}, {"mode": "zero1"}, {"mode": "bucketed"}]
    first = 0
    for size, modes in ((4, on_four), (2, on_two), (1, [{"mode": "single"}])):
        stops = [number + 1 if size > 1 else None for number in range(first, first + len(modes))]
        ways = [(str(parts), {**job, **way}, stop_at) for way, stop_at in zip(modes, stops, strict=True)]
        codes = on_ranks(size, attempts, ways=ways, first=first)
        assert codes == [[75 if stop_at else 0 for stop_at in stops]] * size, modes
        first += len(modes)
    agree_within_rounding(parts, whole)


def slices() -> tuple[torch.nn.Sequential, Forms]:
    """Make a model whose last layer shares the first one's weight."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 3, bias=False), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 3))
    model[2].weight = model[0].weight
    return model, Forms(model)


def states(ranks: int = 1) -> list[ModelState]:
    """Cut it behind the norm, for a pipeline or for some beside each other: two ranks each."""
    model, forms = slices()
    found = []
    for pipe_rank, names in enumerate((("0", "1"), ("2",))):
        module = torch.nn.Module()
        for name in names:
            module.add_module(name, model[int(name)])
        for rank in range(ranks):
            optimizer = build_optimizer(module.parameters(), OptimizerSettings(name="adamw"))
            more = {"scaling/scale": torch.tensor(2.0)}
            found.append(
                held_state(module, optimizer, rank=rank, ranks=ranks, more=more, forms=forms, pipe_rank=pipe_rank)
            )
    return found


def whole_state() -> ModelState:
    """Return the state of the same model on one process."""
    model, _ = slices()
    optimizer = build_optimizer(model.parameters(), OptimizerSettings(name="adamw"))
    return held_state(model, optimizer, more={"scaling/scale": torch.tensor(2.0)})


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_of_pipelines_save_every_element_once_under_the_names_of_one_process(ranks):
    saved = [part.piece for state in states(ranks) for part in state.parts()]
    elements = dict.fromkeys({piece.name for piece in saved}, 0)
    for piece in saved:
        elements[piece.name] += torch.Size(piece.extent).numel()
    assert elements == {part.piece.name: part.piece.elements for part in whole_state().parts()}
    assert not any("2.weight" in name for name in elements), "the first layer's rank saves what both have"


def test_a_rank_reads_its_layers_and_its_copy_of_a_shared_weight_and_makes_what_state_is_stored():
    stored = {part.piece.name: part.piece for part in whole_state().parts()}
    last = states()[1]
    for parameter in last.replica.module.parameters():
        last.optimizer.state.pop(parameter)
    found = {part.piece.name: part for part in last.wanted(stored)}
    of_optimizer = {
        f"optimizer/{name}/{key}" for name in ("0.weight", "2.bias") for key in ("step", "exp_avg", "exp_avg_sq")
    }
    assert set(found) == {"model/0.weight", "model/2.bias", "scaling/scale", *of_optimizer}
    weight = dict(last.replica.module.named_parameters())["2.weight"]
    assert found["model/0.weight"].tensor.data_ptr() == weight.data_ptr()
    assert found["optimizer/0.weight/exp_avg"].tensor is not None
    assert last.optimizer.state[weight]["exp_avg"].shape == (3, 3)


@pytest.mark.parametrize("place", [0, 1], ids=["first rank", "last rank"])
@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("model/1.weight", (4,), r"model/1.weight is F32 \[4\] there, but F32 \[3\] in this job"),
        ("model/1.running_mean", None, "1.running_mean is not in the checkpoint"),
        ("model/3.weight", (3,), "3.weight is only in the checkpoint"),
        ("optimizer/2.weight/exp_avg", (3, 3), "it has exp_avg of 2.weight"),
    ],
)
def test_another_model_is_refused_on_every_rank_whatever_layers_it_has(place, name, shape, message):
    stored = {part.piece.name: part.piece for part in whole_state().parts()}
    stored.pop(name, None)
    if shape is not None:
        stored[name] = replace(stored["model/2.bias"], name=name, shape=shape)
        assert isinstance(stored[name], Piece)
    with pytest.raises(RefusedError, match=message):
        states()[place].wanted(stored)


@pytest.mark.ranks
def test_every_step_has_its_times_on_every_rank_and_every_log_point_a_timeline(on_ranks, tmp_path):
    job = {**GPT, "mode": "1f1b", "steps": 5, "log_every": 2, "microbatches": 3, "evaluate": True}
    assert on_ranks(2, attempt, folder=str(tmp_path), settings=job) == [0, 0]
    run = RunDir(tmp_path)
    own = [read_lines(run.attempt(0).metrics(rank)) for rank in range(2)]
    of_run = [row for row in read_lines(run.metrics) if not row.get("evaluation")]
    for rows in zip(of_run, *own, strict=True):
        assert len({row["loss"] for row in rows}) == 1, "all ranks know the loss of the batch"
        for row in rows:
            phases = [row[f"{phase}_s"] for phase in PHASES]
            assert sum(phases) == pytest.approx(row["step_s"], rel=1e-6)
            assert min(row["forward_s"], row["backward_s"], row["communication_s"], row["optimizer_s"]) > 0.0
    (evaluation,) = (row for row in read_lines(run.metrics) if row.get("evaluation"))
    assert evaluation["perplexity"] > 1.0
    found = read_timeline(run, None, 4)
    (recorded,) = found.pipelines
    assert found.steps == (1, 2, 4, 5)
    done = {(each.rank, each.kind, each.microbatch) for each in recorded.records if each.kind in ("F", "B")}
    assert done == {(rank, kind, number) for rank in range(2) for kind in ("F", "B") for number in range(3)}
    assert 0.0 < recorded.compared.measured < 1.0
