"""Models, data, losses and optimizers of the user's: every mode trains them, and what is wrong is one message."""

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from muster.jobs.basics.errors import RefusedError
from muster.jobs.node.reports import Reporter
from muster.jobs.spec.job import Job
from muster.jobs.spec.modes import MODES
from muster.jobs.spec.train import TrainSettings
from muster.jobs.train.data import open_data
from muster.jobs.train.loop import train
from muster.jobs.train.metrics import Files
from muster.jobs.train.models.made import layers_of, make_model
from muster.jobs.train.models.units import units_of
from muster.jobs.train.trainer import build_trainer
from muster.jobs.train.verify import digest, verify
from muster.jobs.user import code
from muster.jobs.world.world import World
from support.live import LiveRun
from support.programs import Programs

pytestmark = pytest.mark.command

MADE = Path(__file__).parents[2] / "support" / "made"
NET = {"make": "net.py:build"}
NOISY = {"make": "net.py:noisy"}
SGD = {"name": "sgd", "lr": 0.05, "momentum": 0.9}
JOB = {"model": NET, "data": NOISY, "loss": "net.py:loss", "batch_size": 12, "steps": 4, "optimizer": SGD}
GPT = {"data": "synthetic", "batch_size": 8, "steps": 3, "evaluate": False, "optimizer": {"name": "adamw", "lr": 1e-3}}
TWIN = {"make": "net.py:twin", "context": 64}


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's working folder."""
    monkeypatch.chdir(MADE)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return MADE


def settings(**keys: Any) -> TrainSettings:
    return TrainSettings.model_validate({**JOB, **keys})


ALONE = World(0, 1, None, torch.device("cpu"))


def trained(world: World, folder: str, keys: dict[str, Any]) -> str:
    """Train with the user's folder as working folder; return the sha256 of all parameters and buffers."""
    os.chdir(MADE)
    job = TrainSettings.model_validate(keys)
    trainer = build_trainer(job, open_data(job), world)
    files = Files(Path(folder) / f"{world.rank}.jsonl", Path(folder) / "metrics.jsonl" if world.rank == 0 else None)
    train(trainer, files, Reporter({}), attempt=0)
    return hashlib.sha256(b"".join(digest(each) for each in trainer.engine.model.full_state().values())).hexdigest()


def verified(world: World, modes: list[str]) -> list[str]:
    """Compare modes with one process; return those that break what they promise."""
    os.chdir(MADE)
    wrong = []
    for mode in modes:
        model = {**NET, "plan": "net.py:plan"} if mode == "tensor" else NET
        job = json.loads(json.dumps({**JOB, "mode": mode, "model": model, "batch_size": 32, "deterministic": True}))
        record = verify(Job(name="made", kind="train", settings=settings(**job)), world, 2)
        if record is not None and not record["pass"]:
            wrong.append(mode)
    return wrong


@pytest.mark.ranks
@pytest.mark.slow
def test_every_mode_keeps_its_promise(on_ranks):
    modes = [mode for mode in MODES if mode not in ("single", "terapipe")]
    assert on_ranks(2, verified, modes=modes) == [[], []]


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["bucketed", "zero1", "zero3", "fsdp", "1f1b", "tensor"])
def test_a_made_model_ends_with_the_bits_of_ours(on_ranks, tmp_path, mode):
    made = {**TWIN, "plan": "net.py:gpt_plan"} if mode == "tensor" else TWIN
    ours = on_ranks(2, trained, folder=str(tmp_path), keys={**GPT, "mode": mode, "model": "gpt-nano"})
    assert on_ranks(2, trained, folder=str(tmp_path), keys={**GPT, "mode": mode, "model": made}) == ours


@pytest.mark.ranks
@pytest.mark.slow
def test_noise_and_dropout_are_the_same_on_any_number_of_ranks(on_ranks, tmp_path):
    keys = {**JOB, "exact": True, "optimizer": {"make": "net.py:Sign", "lr": 0.01, "args": {"beta": 0.25}}}
    alone = on_ranks(1, trained, folder=str(tmp_path), keys={**keys, "mode": "allreduce"})
    for mode in ("bucketed", "zero3"):
        assert on_ranks(2, trained, folder=str(tmp_path), keys={**keys, "mode": mode}) == alone * 2


def test_activation_checkpointing_changes_no_bit(here, tmp_path):
    plain = trained(ALONE, str(tmp_path), {**JOB, "mode": "single"})
    assert trained(ALONE, str(tmp_path), {**JOB, "mode": "single", "activation_checkpointing": True}) == plain


def test_units_are_repeated_children_or_what_is_named(here):
    model = make_model(settings())
    blocks = list(model.body["blocks"])
    assert units_of(model, settings().model) == [(block,) for block in blocks]
    named = settings(model={**NET, "units": ["body.blocks.[12]", "head"]}, mode="zero3").model
    assert units_of(model, named) == [(blocks[1],), (blocks[2],), (model.head,)]


def test_composite_children_of_one_class_are_units_and_their_leaves_are_not(here):
    twin = make_model(settings(model=TWIN, data="synthetic", loss=None))
    assert units_of(twin, settings(model=TWIN).model) == [(twin.block1,), (twin.block2,)]


def test_layers_keep_the_names_of_the_model(here):
    model = make_model(settings())
    layers = layers_of(model, settings())
    assert dict(layers.named_parameters()).keys() == dict(model.named_parameters()).keys()
    assert list(layers._modules)[1] == "body.blocks.0"


def test_the_files_that_were_imported_are_known_by_their_content(here):
    make_model(settings())
    files = code.files_of(here)
    assert files == {"net.py": hashlib.sha256((here / "net.py").read_bytes()).hexdigest()}
    assert code.changed({**files, "net.py": "0"}, files) == ["net.py"]
    assert code.changed(files, files) == code.changed(None, files) == []


def refusal(**keys: Any) -> str:
    job = settings(mode=keys.pop("mode", "single"), **keys)
    with pytest.raises((RefusedError, code.UserCodeError)) as caught:
        train(build_trainer(job, open_data(job), ALONE), Files(Path(os.devnull), None), Reporter({}), attempt=0)
    return str(caught.value)


WRONG = {
    "none.py:build": "train.model.make: none.py: no such file in .*support/made; correct the name, or set workdir",
    "no.module:build": "train.model.make: no module no in .* or for .*; install it, or correct the name",
    "net.py:biuld": r"train.model.make: net.py has no biuld; did you mean 'build'\? \(it has Block, Net, build",
    "net.py:raises": "train.model.make: net.py:raises raised ValueError: no such luck; see the traceback above",
    "net.py:nothing": "train.model.make: net.py:nothing returned a int; return an nn.Module",
    "net.py:frozen": "train.model.make: net.py:frozen returned a Linear without parameters to train",
    "net.py:late": "rank 0: step 1 raised KeyError: 'late'; see the traceback above",
}


@pytest.mark.parametrize("make", WRONG)
def test_a_wrong_model_is_refused(here, make):
    assert re.match(WRONG[make], refusal(model={"make": make}))


WRONG_DATA = {
    "net.py:nothing": "train.data.make: net.py:nothing returned a int; return a pair (train, eval)",
    "net.py:stream": "train.data.make: the train set of net.py:stream, a tuple_iterator, has no __len__; return a",
    "net.py:empty": "train.data.make: the train set of net.py:empty has no samples; return at least one",
    "net.py:records": "train.data.make: a sample of the train set of net.py:records is a dict; return a pair",
    "net.py:texts": "train.data.make: the input of a sample of the train set of net.py:texts is a str; return a tensor",
    "net.py:ragged": "train.data.make: stacking samples of the train set of net.py:ragged raised RuntimeError: stack",
}


@pytest.mark.parametrize("make", WRONG_DATA)
def test_wrong_data_is_refused(here, make):
    assert refusal(data={"make": make}).startswith(WRONG_DATA[make])


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"model": {**NET, "args": {"widht": 3}}}, "train.model.args: net.py:build takes (width: int = 16) -> net.Net"),
        ({"optimizer": {"make": "net.py:build"}}, "train.optimizer.make: net.py:build is not a subclass of torch"),
        ({"loss": "net.py:per_sample"}, "train.loss: net.py:per_sample returned [12]; return the mean loss as"),
        ({"loss": "net.py:JOB"}, "train.loss: net.py has no JOB"),
        ({"model": {**NET, "units": ["no.*"]}, "activation_checkpointing": True}, "train.model.units: 'no.*' names no"),
        ({"model": "vgg11", "data": {"make": "net.py:few"}}, "train.model.vocabulary: the number of"),
    ],
)  # fmt: skip
def test_so_are_other_wrong_keys(here, keys, said):
    assert refusal(**keys).startswith(said)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        ("net.py:uncut", "train.model.make: net.py:uncut returned a Uncut, which cannot be cut into layers: it is no"),
        (
            "net.py:renamed",
            "train.model.make: layer 1 of stages() of net.py:renamed, a Sequential, is not a module of the",
        ),
        ("net.py:short", "train.model.make: stages() of net.py:short omits body.blocks.0.norm.weight; every"),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused(here, make, said):
    job = settings(model={"make": make}, mode="1f1b")
    with pytest.raises(RefusedError) as caught:
        layers_of(make_model(job), job)
    assert str(caught.value).startswith(said)


def of_the_rank(world: World) -> str:
    os.chdir(MADE)
    os.environ["RANK"] = str(world.rank)
    job = settings(model={"make": "net.py:of_the_rank"}, mode="bucketed")
    with pytest.raises(RefusedError) as caught:
        build_trainer(job, open_data(job), world)
    return str(caught.value)


@pytest.mark.ranks
@pytest.mark.slow
def test_ranks_whose_models_differ_all_hear_of_it(on_ranks):
    said = "model net.py:of_the_rank of rank 1 differs from rank 0's; it may depend only on args and torch"
    assert all(each.startswith(said) for each in on_ranks(2, of_the_rank))


RUN = """
workdir: {folder}
ranks_per_node: 2
train: {{model: {{make: net.py:build}}, data: {{make: net.py:noisy}}, mode: zero2, batch_size: 12, steps: 8}}
checkpoint: {{every_steps: 4}}
"""


@pytest.mark.slow
def test_a_run_goes_on_with_changed_code_on_another_number_of_ranks(tmp_path):
    work = tmp_path / "work"
    work.mkdir()
    (work / "net.py").write_text((MADE / "net.py").read_text())
    live = LiveRun(tmp_path, RUN.format(folder=work))
    assert live.end() == 0
    record = json.loads(live.run.attempt(0).code.read_text())
    assert (record["workdir"], list(record["files"])) == (str(work), ["net.py"])

    (work / "net.py").write_text((MADE / "net.py").read_text() + "\n# another line\n")
    words = ["resume", live.run.run_id, "--runs", str(live.root), "--set", "train.steps=12", "--ranks-per-node", "1"]
    argv = [sys.executable, "-m", "muster", *words]
    said = subprocess.run(argv, capture_output=True, text=True, timeout=90, check=True).stdout
    assert "net.py has changed since step-00000008.a000 was saved; training continues with the current version" in said
    assert "step 12/12" in said


LEAVING = """
name: leaving
train: {model: {make: "leaving.py:build"}, data: synthetic, batch_size: 4, steps: 2}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "status", "code", "said"),
    [
        (["muster", "run"], "'no data here'", 1, "no data here"),
        pytest.param(["muster", "run"], "3", 3, "", marks=pytest.mark.soak),
        (["muster.jobs.train"], "'no data here'", 1, "no data here"),
        (["muster.jobs.train"], "3", 3, ""),
    ],
)
def test_user_code_that_calls_sys_exit_ends_the_rank_with_its_code_and_text(
    programs: Programs, tmp_path: Path, command: list[str], status: str, code: int, said: str
) -> None:
    (tmp_path / "leaving.py").write_text(f"import sys\n\n\ndef build():\n    sys.exit({status})\n")
    (tmp_path / "job.yaml").write_text(LEAVING)
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "OMP_NUM_THREADS": "1"}
    done = programs.run("-m", *command, "job.yaml", "--runs", "runs", cwd=tmp_path, env=env)
    assert done.returncode == code, done.stderr
    assert said in done.stderr
