"""Tied and compiled models of the user's: every mode trains and saves them under the same names."""

import os
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from muster.jobs.basics.files import read_lines
from muster.jobs.node.reports import Reporter
from muster.jobs.spec.train import TrainSettings
from muster.jobs.train.data import open_data
from muster.jobs.train.loop import train
from muster.jobs.train.metrics import Files
from muster.jobs.train.models.made import make_model
from muster.jobs.train.models.units import units_of
from muster.jobs.train.parallel.fsdp import apart
from muster.jobs.train.trainer import Trainer, build_trainer
from muster.jobs.world.world import World
from support.live import LiveRun

pytestmark = pytest.mark.command

MADE = Path(__file__).parents[2] / "support" / "made"
JOB = {
    "model": {"make": "net.py:tied"},
    "data": {"make": "net.py:noisy"},
    "batch_size": 12,
    "steps": 3,
    "mode": "single",
}
MODES = ("allreduce", "bucketed", "ddp", "zero1", "zero2", "zero3", "fsdp")
KINDS = ("allreduce", "ddp", "zero3", "fsdp")  # one of each kind of wrapper, where every mode compiles anew


def trained(world: World, folder: Path, keys: dict[str, Any]) -> Trainer:
    os.chdir(MADE)
    job = TrainSettings.model_validate({**JOB, "optimizer": {"name": "adamw", "lr": 0.01}, **keys})
    trainer = build_trainer(job, open_data(job), world)
    train(trainer, Files(folder / f"{world.rank}.jsonl", None), Reporter({}), attempt=0)
    return trainer


def of_modes(world: World, folder: str, keys: dict[str, Any], modes: list[str], evaluated: list[str]) -> dict[str, Any]:
    """Train in some modes; return the squared norms of the whole state, and the names of the parts to save.

    An evaluation is compiled anew.
    """
    warnings.simplefilter("ignore")  # the compiler itself reads what torch warns of
    torch.compile = partial(torch.compile, backend="aot_eager")  # type: ignore[assignment]
    found = {}
    for mode in modes:
        engine = trained(world, Path(folder), {**keys, "mode": mode, "evaluate": mode in evaluated}).engine
        norms = {name: float(each.double().square().sum()) for name, each in engine.model.full_state().items()}
        found[mode] = {"norms": norms, "parts": [part.piece.name for part in engine.held_state()]}
    return found


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "modes", "evaluated"),
    [
        ({}, MODES, MODES),
        ({"compile": True}, MODES, MODES),
        ({"compile": True, "activation_checkpointing": True}, KINDS, ("ddp", "zero3")),
        ({"model": {"compile": True}}, KINDS, ("allreduce", "fsdp")),
        pytest.param({"compile": True, "activation_checkpointing": True}, MODES, MODES, marks=pytest.mark.soak),
        pytest.param({"model": {"compile": True}}, MODES, MODES, marks=pytest.mark.soak),
    ],
    ids=["plain", "compiled", "recomputed", "compiled by the user", "all recomputed", "all compiled by the user"],
)
def test_every_mode_trains_a_tied_model_and_saves_the_same_names(on_ranks, tmp_path, keys, modes, evaluated):
    args = keys.get("model", {})
    keys = {**keys, "model": {"make": "net.py:tied", "args": args}} if args else keys
    settings = {"folder": str(tmp_path), "keys": keys, "modes": modes, "evaluated": evaluated}
    one, two = on_ranks(2, of_modes, **settings, deadline_s=200.0)
    names = {*one["allreduce"]["parts"], *two["allreduce"]["parts"]}
    for mode in modes:
        assert one[mode]["norms"] == pytest.approx(one["allreduce"]["norms"], rel=1e-4), mode
        assert {*one[mode]["parts"], *two[mode]["parts"]} == names, mode


def test_units_of_fsdp_that_share_a_parameter_are_cut_or_left_to_the_root(monkeypatch):
    monkeypatch.chdir(MADE)
    settings = TrainSettings.model_validate(JOB)
    model = make_model(settings)
    units = units_of(model, settings.model)
    one, two = model.body.values()
    assert units == [(one,), (two,), *((side,) for side in model.sides)]
    assert apart(model, units) == [(two,), *((layer,) for side in model.sides for layer in side.layers)]


@pytest.mark.slow
@pytest.mark.ranks
def test_what_cannot_be_saved_ends_a_run_at_its_first_step(tmp_path):
    net = MADE / "net.py"
    text = f"train: {{model: {{make: '{net}:tied'}}, data: {{make: '{net}:noisy'}}, mode: single, batch_size: 12, "
    text += f"steps: 300, log_every: 100, optimizer: {{make: '{net}:Unsaved', lr: 0.1}}}}\n"
    live = LiveRun(tmp_path, text + "checkpoint: {every_steps: 200}\n")
    assert live.end() == 1, live.err
    assert "complex64" in live.err
    assert len(list(read_lines(live.run.metrics))) <= 1
