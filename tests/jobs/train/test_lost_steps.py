"""The first step without numbers ends the training, in every mode: its update is left out, and it is named."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from muster.jobs.node.reports import Reporter
from muster.jobs.saving.saver import NotSaving
from muster.jobs.spec.modes import MODES, PIPELINES
from muster.jobs.spec.train import TrainSettings
from muster.jobs.spec.train_fields import OptimizerSettings
from muster.jobs.train.data import open_data
from muster.jobs.train.loop import train
from muster.jobs.train.metrics import Files
from muster.jobs.train.numerics.optim import build_optimizer
from muster.jobs.train.numerics.scaling import Scaler
from muster.jobs.train.soundness import NotFiniteError, Soundness
from muster.jobs.train.trainer import Trainer, build_trainer
from muster.jobs.train.verify import digest
from muster.jobs.world.failures import is_lost_connection
from muster.jobs.world.world import World

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
GPT: dict[str, Any] = {
    "model": {"d_model": 16, "d_ff": 32, "layers": 2, "heads": 2, "context": 8},
    "data": "synthetic",
    "batch_size": 16,
    "log_every": 100,
    "evaluate": False,
    "optimizer": {"name": "adamw", "lr": 0.01},
}
UNTIED = {**GPT["model"], "tied": False}
PRODUCT = {"parallel": {"data": 2, "pipe": 2, "zero": 1, "schedule": "1f1b"}}


class Saves(NotSaving):
    """Would save after every step, and remembers which it did and how it was told of the end."""

    def __init__(self) -> None:
        self.saved: list[int] = []

    def is_due(self, done: int) -> bool:
        return True

    def step_done(self, done: int, losses: Sequence[tuple[int, float]]) -> None:
        self.saved.append(done)

    def finish(self, done: int, losses: Sequence[tuple[int, float]]) -> None:
        self.saved.append(-done)


def poison(trainer: Trainer, world: World, what: str, step: int) -> None:
    """In one step, put an infinity into what one rank's embedding returns, or into its gradient alone."""
    first_of_pipe = world.rank == 0 if trainer.settings.is_pipeline else world.rank == world.size - 1
    if not first_of_pipe:
        return
    engine = trainer.engine
    of_step, now = engine.train_step, [0]

    def counted(number: int, shards: Any) -> list[Tensor]:
        now[0] = number + 1
        return of_step(number, shards)

    def spoilt(tensor: Tensor) -> Tensor:
        if now[0] != step:
            return tensor
        bad = torch.zeros_like(tensor)
        bad.view(-1)[0] = torch.inf
        return tensor + bad

    def watch(module: nn.Module, inputs: object, output: Tensor) -> Tensor | None:
        if what == "gradient":
            if output.requires_grad:
                output.register_hook(spoilt)
            return None
        return spoilt(output)

    engine.train_step = counted  # type: ignore[method-assign]
    engine.module.embed.token.register_forward_hook(watch)


def trained(world: World, folder: str, what: str, steps: int, **settings: Any) -> dict[str, Any]:
    """Train with step 3 poisoned, or not; return what was said and saved, the steps of rows, and the weights."""
    job = TrainSettings.model_validate({**GPT, "steps": steps, **settings})
    trainer, saves, said = build_trainer(job, open_data(job), world), Saves(), ""
    if what:
        poison(trainer, world, what, 3)
    path = Path(folder) / f"{what}-{world.rank}.jsonl"
    files = Files(path, None)
    try:
        train(trainer, files, Reporter({}), attempt=0, saving=saves)
    except NotFiniteError as error:
        said = str(error).partition(":")[0]
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {
        "said": said,
        "rows": [row["step"] for row in rows],
        "skipped": [row["step"] for row in rows if row.get("skipped")],
        "saved": saves.saved,
        "weights": {name: digest(each).hex() for name, each in trainer.engine.model.full_state().items()},
    }


CASES = [(name, {"mode": name}, 1 if name == "single" else 2) for name in MODES if name != "terapipe"]
CASES += [
    ("exact", {"mode": "bucketed", "exact": True}, 2),
    ("clipped zero3", {"mode": "zero3", "clip_norm": 1.0}, 2),
    ("pure_bf16", {"mode": "zero2", "precision": "pure_bf16"}, 2),
    ("product", PRODUCT, 4),
    ("terapipe", {"parallel": {"pipe": 2, "schedule": "terapipe", "tokens": [5, 3]}}, 2),
    ("clipped zb1p", {"mode": "zb1p", "clip_norm": 1.0}, 2),
]


# .ci/run tries both poisons in some modes, and one in the others; none in those that differ only in how they send
BOTH = {"single", "bucketed", "zero3", "tensor", "clipped zb1p"}
RARELY = {"allreduce", "overlap", "zero1", "zero2", "model", "gpipe", "1f1b", "zb1p", "clipped zero3"}
EACH = [
    pytest.param(
        *(what, settings, ranks),
        id=f"{name}-{what}",
        marks=[] if name not in RARELY and (what == "loss" or name in BOTH) else pytest.mark.soak,
    )
    for name, settings, ranks in CASES
    for what in ("loss", "gradient")
    # A stage that has lost a gradient only ends alone, unless it exchanges a norm.
    if what == "loss" or "clip_norm" in settings or not (name in PIPELINES or name == "product")
]


@pytest.mark.ranks
@pytest.mark.parametrize(("what", "settings", "ranks"), EACH)
def test_it_ends_at_the_step_without_its_update_on_every_rank(on_ranks, tmp_path, what, settings, ranks):
    alone = {"group": False} if ranks == 1 else {}
    lost = on_ranks(ranks, trained, folder=str(tmp_path), what=what, steps=6, **settings, **alone)
    clean = on_ranks(ranks, trained, folder=str(tmp_path), what="", steps=2, **settings, **alone)
    for found, wanted in zip(lost, clean, strict=True):
        assert found["said"] == "loss or gradients are not finite at step 3"
        assert (found["rows"], found["saved"]) == ([1, 2, 3], [1, 2])
        assert (wanted["said"], found["weights"]) == ("", wanted["weights"])


def ended_alone(world: World, folder: str) -> str:
    job = TrainSettings.model_validate({**GPT, "steps": 6, "mode": "1f1b", "model": UNTIED})
    trainer = build_trainer(job, open_data(job), world)
    poison(trainer, world, "gradient", 3)
    try:
        train(trainer, Files(Path(folder) / f"{world.rank}.jsonl", None), Reporter({}), attempt=0)
    except NotFiniteError as error:
        return str(error).partition(":")[0]
    except Exception as error:
        return "a victim" if is_lost_connection(error) else str(error)
    return "trained"


@pytest.mark.ranks
def test_a_stage_that_has_lost_a_gradient_is_the_culprit_and_the_others_are_its_victims(on_ranks, tmp_path):
    found = on_ranks(2, ended_alone, folder=str(tmp_path))
    assert found == ["loss or gradients are not finite at step 3", "a victim"]


@pytest.mark.ranks
@pytest.mark.parametrize("mode", ["zero1", "1f1b"])
def test_where_it_is_told_to_skip_it_goes_on_and_the_row_says_so(on_ranks, tmp_path, mode):
    settings = {"mode": mode, "non_finite": "skip"}
    for found in on_ranks(2, trained, folder=str(tmp_path), what="gradient", steps=6, **settings):
        assert (found["said"], found["skipped"], found["saved"][-1]) == ("", [3], -6)


@pytest.mark.ranks
def test_in_fp16_a_gradient_is_part_of_the_search_and_a_loss_ends_it_at_a_log_point(on_ranks, tmp_path):
    settings = {"mode": "bucketed", "precision": "fp16"}
    for what, said in (("gradient", ""), ("loss", "loss or gradients are not finite at step 3")):
        for found in on_ranks(2, trained, folder=str(tmp_path), what=what, steps=4, **settings):
            assert found["said"] == said


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_gradient_that_only_sums_to_infinity_is_stepped_with(dtype):
    weight = nn.Parameter(torch.ones(64, dtype=dtype))
    optimizer = build_optimizer([weight], OptimizerSettings(name="sgd", lr=1e-30))
    scaler = Scaler(CPU)
    for place, value in enumerate((torch.finfo(dtype).max, -torch.inf, torch.nan, 0.5)):
        weight.grad = torch.full_like(weight, torch.finfo(dtype).max if place == 0 else 0.5)
        weight.grad[7] = value
        scaler.prepare([weight.grad, torch.zeros(0)], None)
        scaler.advance(optimizer)
        assert (float(scaler.found_inf), int(scaler.first_lost)) == [(0.0, 0), (1.0, 2), (1.0, 2), (0.0, 2)][place]


def test_the_step_is_counted_from_where_the_attempt_began_and_the_earliest_is_named():
    first_lost = torch.tensor(0)
    soundness = Soundness(first_lost, 40)
    assert not soundness.is_lost()
    first_lost.fill_(3)
    assert soundness.is_lost()
    for losses, step in (([(42, 1.0), (43, 1.0)], 43), ([(42, float("nan")), (43, 1.0)], 42)):
        with pytest.raises(NotFiniteError, match=f"^loss or gradients are not finite at step {step}: lower"):
            soundness.hear(losses)
