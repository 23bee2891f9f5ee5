"""A training whose losses or weights are no numbers any more ends, with a sentence, and saves nothing of it."""

import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from muster.jobs.models.shapes import POOL, VGG_SHAPES, VggShape
from muster.jobs.node.reports import Reporter
from muster.jobs.saving.saver import NotSaving
from muster.jobs.spec.train import TrainSettings
from muster.jobs.train.data import open_data
from muster.jobs.train.evaluate import evaluate
from muster.jobs.train.loop import train
from muster.jobs.train.metrics import Files
from muster.jobs.train.soundness import LOG_POINTS, NotFiniteError, Soundness, require_finite
from muster.jobs.train.trainer import build_trainer
from muster.jobs.world.guard import guarded
from muster.jobs.world.world import World
from muster.launch.records.advice import next_step

pytestmark = pytest.mark.ranks

NAN = math.nan
TINY_VGG = VggShape("vgg-tiny", (8, POOL, 8, POOL, 16, POOL, 16, POOL, 16, POOL))
VGG = {"model": "vgg-tiny", "data": "digits", "batch_size": 24, "steps": 8, "evaluate": False}


def heard(*points: list[float]) -> str:
    """Tell log points, whose steps are counted through from 1; return what was said of the last one."""
    soundness, step = Soundness(torch.zeros((), dtype=torch.int64), stops=False), 0
    for place, losses in enumerate(points):
        numbered = [(step + number, loss) for number, loss in enumerate(losses, 1)]
        step += len(losses)
        try:
            soundness.hear(numbered)
        except NotFiniteError as error:
            assert place == len(points) - 1
            return str(error)
    return ""


@pytest.mark.parametrize("bad", [NAN, math.inf, -math.inf])
def test_three_log_points_without_a_number_end_it_and_the_first_such_step_is_named(bad):
    assert heard([1.0, bad], [bad, bad], [bad], [bad]).startswith("loss is not finite since step 2: lower train.opt")
    assert heard(*[[bad]] * LOG_POINTS).startswith("loss is not finite since step 1: ")


def test_losses_that_come_back_are_forgiven():
    assert heard([NAN], [NAN], [NAN, 1.0], [NAN], [NAN]) == ""
    assert heard([NAN], [NAN, 1.0, NAN], [NAN], [NAN, 1.0]) == ""
    assert heard([1.0, NAN], [NAN], [NAN], [NAN]).startswith("loss is not finite since step 2")


def weights(world: World, mode: str) -> list[str]:
    VGG_SHAPES["vgg-tiny"] = TINY_VGG
    settings = TrainSettings.model_validate({**VGG, "mode": mode})
    trainer = build_trainer(settings, open_data(settings), world)
    said = []
    for value in (1e30, math.inf):
        for part in trainer.engine.held_state():  # the buffers of every norm may hold what they like
            if "running_mean" in part.piece.name:
                part.tensor.fill_(NAN)
            if part.piece.name == "model/head.weight" and part.tensor.numel() and world.rank == world.size - 1:
                part.tensor.view(-1)[-1] = value
        try:
            require_finite(trainer.engine, world, 8)
            said.append("")
        except NotFiniteError as error:
            said.append(str(error).partition(":")[0])
    return said


@pytest.mark.parametrize("mode", ["ddp", "zero3"])
def test_a_weight_that_is_no_number_is_named_on_every_rank_by_whoever_has_it(on_ranks, mode):
    assert on_ranks(2, weights, mode=mode) == [["", "weights are not finite after step 8, first head.weight"]] * 2


class Saves(NotSaving):
    """Remembers whether it was asked to save the end."""

    asked = False

    def finish(self, done: int, losses: Sequence[tuple[int, float]]) -> None:
        self.asked = True


def last_step(world: World, folder: str, lr: float) -> list[str | bool]:
    """Train for one step: its loss is that of the first weights, and a number."""
    VGG_SHAPES["vgg-tiny"] = TINY_VGG
    job = {**VGG, "steps": 1, "mode": "ddp", "optimizer": {"name": "sgd", "lr": lr}}
    settings = TrainSettings.model_validate(job)
    trainer, saves, said = build_trainer(settings, open_data(settings), world), Saves(), ""
    files = Files(Path(folder) / f"{world.rank}.jsonl", None)
    try:
        train(trainer, files, Reporter({}), attempt=0, saving=saves)
    except NotFiniteError as error:
        said = str(error).partition(",")[0]
    return [said, saves.asked]


def test_weights_that_the_last_step_has_lost_are_not_saved(on_ranks, tmp_path):
    lost = ["weights are not finite after step 1", False]
    assert on_ranks(2, last_step, folder=str(tmp_path), lr=1e60) == [lost] * 2
    assert on_ranks(2, last_step, folder=str(tmp_path), lr=0.1) == [["", True]] * 2


def test_the_rank_ends_with_1_and_one_line_so_that_another_attempt_may_find_the_numbers_again(capsys):
    def work(reporter: Reporter) -> int:
        raise NotFiniteError("loss is not finite since step 3: lower it")

    assert guarded(work) == 1
    assert capsys.readouterr().err == "muster: loss is not finite since step 3: lower it\n"


def test_what_it_says_is_known_to_the_advice():
    with pytest.raises(NotFiniteError) as caught:
        Soundness(torch.tensor(3)).end()
    for said in (heard([NAN], [NAN], [NAN]), caught.value):
        failure = {"rank": 0, "code": 1, "signal": None, "message": f"NotFiniteError: {said}", "last_lines": []}
        assert next_step("failed", failure).startswith("the loss is NaN or infinite")


def test_a_model_that_has_lost_its_numbers_has_no_perplexity_and_not_an_infinite_one():
    settings = TrainSettings.model_validate({"model": "gpt-nano", "data": "synthetic", "mode": "single"})
    data = open_data(settings)

    class Lost:
        model = SimpleNamespace(synchronize_buffers=lambda: None, world=World(0, 1, None, torch.device("cpu")))

        def predict(self, inputs: torch.Tensor) -> torch.Tensor:
            return torch.full((*inputs.shape, data.vocabulary), torch.nan)

        def with_room(self, work):
            return work()

        def agree_on_graphs(self) -> None:
            assert self.model.world.size == 1

    found = evaluate(Lost(), data, Lost.model.world, torch.float32)
    assert math.isnan(found.loss)
    assert math.isnan(found.value)
