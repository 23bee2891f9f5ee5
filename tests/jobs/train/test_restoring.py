"""What is refused before the first step: another job, another checkpoint, ranks that do not agree. Quickly."""

import contextlib
import io
import json
import time
from pathlib import Path

import pytest

from muster.jobs.basics.errors import MusterError
from muster.jobs.checkpoint.choose import newest_good
from muster.jobs.models.shapes import VGG_SHAPES
from muster.jobs.node import page
from muster.jobs.node.page import Page
from muster.jobs.node.reports import Reporter
from muster.jobs.runfolder.rundir import RunDir
from muster.jobs.saving.resume import Resume
from muster.jobs.spec.job import Job
from muster.jobs.spec.train import TrainSettings
from muster.jobs.train.main import TrainStart, train_in
from muster.jobs.world.world import World
from support.resuming import GPT, SMALL_GPT, TINY_VGG, VGG, attempt

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

GPT_4 = {**GPT, "mode": "ddp", "steps": 4, "optimizer": {"name": "sgd", "lr": 0.1}}


def go_on(world: World, folder: str, settings: dict, of_rank: dict | None = None) -> list:
    """Go on from the newest checkpoint, on one rank perhaps from something else; return the code and what was said."""
    VGG_SHAPES["vgg-tiny"] = TINY_VGG
    page.own = Page()
    run = RunDir(Path(folder))
    chosen = newest_good(run, mark=False)
    assert chosen is not None
    resume = {"checkpoint": chosen.folder.name, "step": chosen.manifest.step, "sha256": chosen.manifest.sha256}
    resume.update((of_rank or {}).get(str(world.rank), {}))
    folder_of_rank = resume.pop("run", folder)
    job = Job.model_validate({"kind": "train", "settings": TrainSettings.model_validate(settings)})
    began = time.monotonic()
    try:
        start = TrainStart(RunDir(Path(folder_of_rank)), 1, Resume.read(resume))
        return [train_in(start, job, world, Reporter({})), "", time.monotonic() - began]
    except MusterError as error:
        return [error.exit_code, str(error), time.monotonic() - began]


@pytest.fixture
def saved(on_ranks, tmp_path):
    """A run that was stopped after two of four steps, on two ranks."""
    assert on_ranks(2, attempt, folder=str(tmp_path), settings=GPT_4, stop_at=2) == [75, 75]
    return tmp_path


CHANGES = {
    "train.model.dropout": ({"model": {**SMALL_GPT, "dropout": 0.2}}, "0.1", "0.2"),
    "train.batch_size": ({"batch_size": 16}, "12", "16"),
    "train.seed": ({"seed": 5}, "0", "5"),
    "train.precision": ({"precision": "fp64"}, "fp32", "fp64"),
    "train.optimizer.name": ({"optimizer": {"name": "adamw"}}, "sgd", "adamw"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_setting_that_must_stay_is_named_with_what_was_found_and_wanted(on_ranks, saved, name):
    change, before, now = CHANGES[name]
    for code, said, _ in on_ranks(2, go_on, folder=str(saved), settings={**GPT_4, **change}):
        assert code == 78
        assert f"it was saved with {name} " in said
        found, _, wanted = said.partition("the job has")
        assert before in found
        assert now in wanted


def test_other_data_are_refused(on_ranks, tmp_path):
    texts = []
    for number in range(2):
        texts.append(tmp_path / f"text-{number}")
        texts[-1].write_text(f"some words {number} " * 4000)
    run = tmp_path / "run"
    run.mkdir()
    job = {**GPT_4, "mode": "single", "batch_size": 4}
    on_ranks(1, attempt, folder=str(run), settings={**job, "data": {"text": str(texts[0])}}, stop_at=2)
    ((code, said, _),) = on_ranks(1, go_on, folder=str(run), settings={**job, "data": {"text": str(texts[1])}})
    assert code == 78
    assert "it was saved with train.data" in said


def test_what_may_change_does(on_ranks, saved):
    changed = {**GPT_4, "mode": "allreduce", "optimizer": {"name": "sgd", "lr": 0.01, "momentum": 0.9}, "steps": 5}
    assert [code for code, _, _ in on_ranks(3, go_on, folder=str(saved), settings=changed)] == [0, 0, 0]


def test_another_number_of_virtual_ranks_is_refused_where_the_sum_is_exact(on_ranks, tmp_path):
    job = {**VGG, "mode": "allreduce", "exact": True, "virtual_ranks": 4, "steps": 2}
    on_ranks(2, attempt, folder=str(tmp_path), settings=job, stop_at=1)
    ((code, said, _), _) = on_ranks(2, go_on, folder=str(tmp_path), settings={**job, "virtual_ranks": 2})
    assert (code, "train.virtual_ranks 4, but the job has 2" in said) == (78, True)


@pytest.mark.parametrize("other", [{"sha256": "ab" * 32}, {"run": "elsewhere"}], ids=["another hash", "another folder"])
def test_ranks_that_do_not_agree_on_the_checkpoint_are_refused_within_seconds(on_ranks, saved, tmp_path, other):
    other = {key: str(tmp_path / value) if key == "run" else value for key, value in other.items()}
    results = on_ranks(3, go_on, folder=str(saved), settings=GPT_4, of_rank={"1": other})
    for rank, (code, said, seconds) in enumerate(results):
        assert code == (66 if rank == 1 and "run" in other else 78)
        assert "rank 1" in said or rank == 1
        assert seconds < 25.0, "nobody waits for a message that does not come: that takes 30 s here"


def test_a_checkpoint_that_changed_since_it_was_chosen_is_refused_on_all_ranks(on_ranks, saved):
    other = {str(rank): {"sha256": "cd" * 32} for rank in range(2)}
    for code, said, _ in on_ranks(2, go_on, folder=str(saved), settings=GPT_4, of_rank=other):
        assert code == 78
        assert "but the chosen one had cdcdcdcdcdcd and step 2; choose again: muster resume" in said


def listen(world: World, **arguments) -> str:
    """Make an attempt; return what this rank printed."""
    heard = io.StringIO()
    with contextlib.redirect_stdout(heard):
        attempt(world, **arguments)
    return heard.getvalue()


def test_steps_that_are_done_again_are_compared_with_the_log_of_the_first_time(on_ranks, saved):
    # An attempt goes on to the end, saves nothing and is lost: the next one does its steps again.
    assert [code for code, _, _ in on_ranks(2, go_on, folder=str(saved), settings=GPT_4)] == [0, 0]
    said, silent = on_ranks(2, listen, folder=str(saved), settings=GPT_4, number=2)
    assert "continues from step-00000002.a000, step 2 of 4, read in " in said
    assert "2 steps repeated: the same losses, bit for bit\n" in said
    assert silent == ""
    logged = [json.loads(line) for line in (saved / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["attempt"]) for row in logged] == [(1, 0), (2, 0), (3, 1), (4, 1), (3, 2), (4, 2)]
