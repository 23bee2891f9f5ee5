"""Whole trainings on real ranks: the same bits on any number of them, and what they write down."""

import contextlib
import hashlib
import io
import json
from pathlib import Path

import pytest

from muster.jobs.models.shapes import VGG_SHAPES
from muster.jobs.node.reports import Reporter
from muster.jobs.spec.modes import MODES, PIPELINES
from muster.jobs.spec.train import TrainSettings
from muster.jobs.train.data import open_data
from muster.jobs.train.evaluate import BLOCK_SAMPLES, evaluate
from muster.jobs.train.loop import train
from muster.jobs.train.metrics import Files
from muster.jobs.train.soundness import LOG_POINTS, NotFiniteError
from muster.jobs.train.trainer import Trainer, build_trainer
from muster.jobs.train.verify import digest
from muster.jobs.world.world import World
from support.resuming import GPT as RESUMED
from support.resuming import SGD, TINY_VGG, few_digits

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

VGG = {"model": "vgg-tiny", "data": "digits", "batch_size": 19, "epochs": 2, "optimizer": SGD, "log_every": 3}
GPT = {**RESUMED, "batch_size": 10, "steps": 5}

STEP_KEYS = {
    *("step", "steps", "epoch", "attempt", "rank", "loss", "lr", "time", "step_s", "rate", "unit"),
    *("data_s", "forward_s", "backward_s", "communication_s", "optimizer_s"),
}


def prepared(world: World, settings: dict, few: tuple[int, int] | None = (60, 12)) -> Trainer:
    """Prepare a training; of the digits, on these numbers of samples to train and to evaluate."""
    VGG_SHAPES["vgg-tiny"] = TINY_VGG
    job = TrainSettings.model_validate(settings)
    data = open_data(job)
    if few and data.name == "digits":
        data = few_digits(data, *few)
    return build_trainer(job, data, world)


def run(world: World, folder: str, settings: dict, **more: None) -> str:
    """Train; return the sha256 of all parameters and buffers, whoever has them."""
    trainer = prepared(world, settings, **more)
    own = Path(folder) / f"metrics-{world.rank:05d}.jsonl"
    files = Files(own, Path(folder) / "metrics.jsonl" if world.rank == 0 else None)
    train(trainer, files, Reporter({}), attempt=0)
    return hashlib.sha256(b"".join(digest(each) for each in trainer.engine.model.full_state().values())).hexdigest()


def rows(path: Path, evaluation: bool = False) -> list[dict]:
    read = [json.loads(line) for line in path.read_text().splitlines()]
    return [row for row in read if row.get("evaluation", False) == evaluation]


# Of each mode that can be exact: the numbers of ranks that are compared with one rank.
EXACT = {
    "gather_scatter": (2,),
    "allreduce": (2, 4),
    "flat": (4,),
    "overlap": (4,),
    "bucketed": (1, 2, 4),
    "zero1": (2,),
    "zero2": (2,),
    "zero3": (4,),
}
ALONE: dict[str, tuple[set[str], list[float], list[float]]] = {}  # by model: what one rank makes


def exact(on_ranks, folder: Path, settings: dict, mode: str, world_size: int) -> tuple[set, list, list]:
    """Train; return the ranks' hashes, and the losses of the steps and the evaluations."""
    folder.mkdir()
    job = {**settings, "mode": mode, "exact": True, "virtual_ranks": 4}
    hashes = set(on_ranks(world_size, run, folder=str(folder), settings=job))
    path = folder / "metrics.jsonl"
    return hashes, [row["loss"] for row in rows(path)], [row["loss"] for row in rows(path, evaluation=True)]


@pytest.mark.parametrize(
    ("settings", "mode"),
    [
        *(pytest.param(VGG, mode, marks=pytest.mark.soak) for mode in ("gather_scatter", "allreduce")),
        (VGG, "bucketed"),
        *((GPT, mode) for mode in EXACT),
    ],
    ids=lambda value: value if isinstance(value, str) else str(value["model"]),
)
def test_exact_training_has_the_same_bits_and_losses_in_every_mode_on_one_two_and_four_ranks(
    on_ranks, tmp_path, settings, mode
):
    # VGG: batch norm, momentum, 3 x 19 + 3 samples an epoch, so that a virtual rank is left empty. GPT: dropout, tied
    name = str(settings["model"])
    if name not in ALONE:
        ALONE[name] = exact(on_ranks, tmp_path / "alone", settings, "allreduce", 1)
    hashes, losses, _ = ALONE[name]
    assert (len(hashes), len(losses)) == (1, settings.get("steps", 8))
    for world_size in EXACT[mode]:
        assert exact(on_ranks, tmp_path / str(world_size), settings, mode, world_size) == ALONE[name]


def test_every_mode_that_can_be_exact_is_tried():
    of_pipelines = set(PIPELINES)  # test_pipeline.py
    assert set(EXACT) == {name for name, mode in MODES.items() if mode.can_be_exact} - of_pipelines


@pytest.mark.parametrize(
    "mode", ["allreduce", "bucketed", "ddp", "zero3", "fsdp"]
)  # one of each way to time the communication
def test_every_step_has_a_whole_row_on_every_rank_and_in_the_run(on_ranks, tmp_path, mode):
    on_ranks(2, run, folder=str(tmp_path), settings={**VGG, "mode": mode})
    of_run = rows(tmp_path / "metrics.jsonl")
    own = [rows(tmp_path / f"metrics-{rank:05d}.jsonl") for rank in range(2)]
    for rank, each in enumerate(own):
        assert [row["step"] for row in each] == [1, 2, 3, 4, 5, 6, 7, 8]
        assert all(set(row) == {*STEP_KEYS, "samples"} and row["rank"] == rank for row in each)
    assert [row["step"] for row in of_run] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [row["epoch"] for row in of_run] == [1, 1, 1, 1, 2, 2, 2, 2]
    assert all(set(row) == STEP_KEYS for row in of_run)
    for row, *ranks in zip(of_run, *own, strict=True):
        counted = [each["samples"] for each in ranks]
        assert sum(counted) == (3 if row["step"] % 4 == 0 else 19)
        mean = sum(each["loss"] * n for each, n in zip(ranks, counted, strict=True)) / sum(counted)
        assert row["loss"] == pytest.approx(mean, rel=1e-12)
        for each in ranks:
            phases = sum(each[key] for key in STEP_KEYS if key.endswith("_s") and key != "step_s")
            assert phases == pytest.approx(each["step_s"], rel=1e-6)
            assert each["communication_s"] > 0.0
    evaluations = rows(tmp_path / "metrics.jsonl", evaluation=True)
    assert [(row["step"], row["epoch"]) for row in evaluations] == [(4, 1), (8, 2)]
    assert all(0.0 <= row["accuracy"] <= 1.0 for row in evaluations)


def test_loader_processes_read_what_the_rank_itself_would_read(on_ranks, tmp_path):
    ahead = {**GPT, "mode": "single", "loader_workers": 2}
    here = {**GPT, "mode": "single"}
    hashes = [on_ranks(1, run, group=False, folder=str(tmp_path), settings=each) for each in (ahead, here)]
    assert hashes[0] == hashes[1]


def test_a_training_that_learns_reaches_what_it_should(on_ranks, tmp_path):
    settings = {**VGG, "mode": "ddp", "batch_size": 60, "epochs": 3}
    on_ranks(2, run, folder=str(tmp_path), settings=settings, few=None)
    evaluations = rows(tmp_path / "metrics.jsonl", evaluation=True)
    assert evaluations[-1]["accuracy"] > 0.8  # ten classes; 0.1 is chance


def measured(world: World, mode: str) -> list:
    """Evaluate a fixed model; on one rank, also count by hand on all samples at once."""
    import torch
    from torch.nn import functional

    trainer = prepared(world, {**VGG, "mode": mode}, few=(60, 296))
    result = evaluate(trainer.engine, trainer.data, trainer.world, trainer.dtype)
    assert result is not None
    if world.size > 1:
        return [result.loss, result.value]
    inputs, targets = trainer.data.eval_batch(torch.arange(trainer.data.eval_samples))
    outputs = trainer.engine.predict(inputs)
    accuracy = float((outputs.argmax(-1) == targets).double().mean())
    return [result.loss, result.value, float(functional.cross_entropy(outputs, targets)), accuracy]


def test_an_evaluation_has_the_same_bits_on_any_world_and_is_the_mean_over_all_samples(on_ranks):
    assert 296 % BLOCK_SAMPLES  # the last block is short
    assert -(-296 // BLOCK_SAMPLES) % 4  # of four ranks that share parameters out, some have a block less
    ways = (("single", 1), ("ddp", 2), ("ddp", 3), ("zero3", 4), ("fsdp", 4), ("1f1b", 3))
    results = [on_ranks(size, measured, group=size > 1, mode=mode) for mode, size in ways]
    assert len({tuple(each[:2]) for ranks in results for each in ranks}) == 1
    loss, accuracy, by_hand, accuracy_by_hand = results[0][0]
    assert loss == pytest.approx(by_hand, rel=1e-5)
    assert accuracy == pytest.approx(accuracy_by_hand, abs=1e-12)


def full_disk(world: World) -> str:
    from muster.jobs.basics.errors import StorageError
    from muster.jobs.basics.files import append_lines

    try:
        append_lines(Path("/dev/full"), [{"step": 1}])
    except StorageError as error:
        return str(error)
    return "nothing was raised"


def test_a_full_disk_is_a_storage_error_that_names_the_file(on_ranks):
    assert on_ranks(1, full_disk, group=False)[0].startswith("/dev/full: No space left on device; free some space")


@pytest.mark.parametrize(("non_finite", "points"), [("stop", 1), ("skip", LOG_POINTS)])
def test_a_loss_that_is_no_number_is_said_once_and_leaves_the_rows_json(on_ranks, tmp_path, non_finite, points):
    broken = {**VGG, "mode": "ddp", "log_every": 1, "optimizer": {"name": "sgd", "lr": 1e30}, "non_finite": non_finite}
    said = on_ranks(2, run_and_listen, folder=str(tmp_path), settings=broken)

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    for path in tmp_path.iterdir():
        read = [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]
        steps = [row for row in read if not row.get("evaluation")]
        lost = [row["step"] for row in steps if row["loss"] is None]
        assert lost == [first_lost(tmp_path) + more for more in range(points)], "it ends then"
        assert [row.get("skipped") for row in steps[-1:]] == [1.0 if non_finite == "skip" else None]
        assert [row["step"] for row in steps] == list(range(1, lost[-1] + 1))
        assert steps[0]["loss"] is not None
    warnings = [[line for line in text.splitlines() if "loss is not finite" in line] for text in said]
    assert warnings == [[f"loss is not finite at step {first_lost(tmp_path)}: {ADVICE}"], []]


ADVICE = "lower train.optimizer.lr, or set train.clip_norm"


def first_lost(folder: Path) -> int:
    return next(row["step"] for row in rows(folder / "metrics.jsonl") if row["loss"] is None)


def run_and_listen(world: World, folder: str, settings: dict) -> str:
    """Train; return what this rank printed."""
    heard = io.StringIO()
    with contextlib.redirect_stdout(heard), contextlib.suppress(NotFiniteError):
        run(world, folder, settings)
    return heard.getvalue()
