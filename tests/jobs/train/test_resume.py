"""A training that is stopped and gone on with is the training that was never stopped."""

import json
from collections import Counter
from pathlib import Path

import pytest

from muster.jobs.checkpoint.choose import newest_good
from muster.jobs.runfolder.rundir import RunDir
from support.resuming import GPT, SMALL_GPT, agree_within_rounding, attempt, hashes
from support.resuming import VGG as OF_240
from support.soak import only_some

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

VGG = {**OF_240, "batch_size": 24}
FEW = {"few": (141, 12)}  # digits to train on and to evaluate


def rows(folder: Path, *, evaluation: bool = False) -> list[dict]:
    read = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in read if row.get("evaluation", False) == evaluation]


def move(on_ranks, parts: Path, job: dict, ways: tuple[tuple[str, int, int], ...]) -> None:
    """Make attempts, each (mode, ranks, stop after a step)."""
    for number, (mode, size, stop_at) in enumerate(ways):
        more = {"settings": {**job, "mode": mode}, "number": number, "stop_at": stop_at}
        assert on_ranks(size, attempt, folder=str(parts), **more) == [75] * size, mode


@pytest.fixture
def whole(tmp_path):
    return tmp_path / "whole"


@pytest.fixture
def parts(tmp_path):
    return tmp_path / "parts"


@pytest.mark.parametrize(
    "case",
    only_some(
        [
            *("vgg single", "vgg ddp", "vgg zero3"),  # buffers, and buckets that are dealt anew
            *("gpt single", "gpt ddp", "gpt gather_scatter", "gpt allreduce", "gpt flat", "gpt overlap"),
            *("gpt bucketed", "gpt zero1", "gpt fsdp"),
        ],
        ["vgg zero3", "gpt bucketed", "gpt fsdp"],
    ),
)
def test_two_resumes_within_an_epoch_change_no_bit(on_ranks, whole, parts, case):
    model, mode = case.split()
    settings = {"vgg": VGG, "gpt": GPT}[model]
    # On three ranks the order of a sum shows: PyTorch's DDP deals its buckets anew after the first backward it sees.
    size = 1 if mode == "single" else 3
    job = {**settings, "mode": mode, "steps": 6}
    assert on_ranks(size, attempt, folder=str(whole), settings=job) == [0] * size
    assert on_ranks(size, attempt, folder=str(parts), settings=job, stop_at=2) == [75] * size
    assert on_ranks(size, attempt, folder=str(parts), settings=job, number=1, stop_at=4) == [75] * size
    assert on_ranks(size, attempt, folder=str(parts), settings=job, number=2) == [0] * size
    assert hashes(parts) == hashes(whole)
    assert [row["loss"] for row in rows(parts)] == [row["loss"] for row in rows(whole)]
    assert [row["lr"] for row in rows(parts)] == [row["lr"] for row in rows(whole)]


def test_loader_processes_and_accumulation_resume_bit_by_bit(on_ranks, whole, parts):
    job = {**GPT, "mode": "ddp", "loader_workers": 2, "grad_accumulation": 2, "clip_norm": 0.1}
    on_ranks(2, attempt, folder=str(whole), settings=job)
    assert on_ranks(2, attempt, folder=str(parts), settings=job, stop_at=3) == [75, 75]
    assert on_ranks(2, attempt, folder=str(parts), settings=job, number=1) == [0, 0]
    assert hashes(parts) == hashes(whole)


def test_exact_training_moves_between_modes_and_one_two_and_four_ranks_without_a_changed_bit(on_ranks, whole, parts):
    job = {**VGG, "exact": True, "virtual_ranks": 4, "clip_norm": 0.1}
    on_ranks(1, attempt, folder=str(whole), settings={**job, "mode": "allreduce"})
    ways = (("bucketed", 2, 2), ("zero3", 4, 4), ("overlap", 4, 5), ("zero1", 2, 6), ("flat", 1, 7))
    move(on_ranks, parts, job, ways)
    last = on_ranks(1, attempt, folder=str(parts), settings={**job, "mode": "gather_scatter"}, number=len(ways))
    assert last == [0]
    assert hashes(parts) == hashes(whole)


def test_on_other_worlds_and_in_other_modes_float64_agrees_within_rounding(on_ranks, whole, parts):
    # Batch norm takes its statistics per rank, so another number of ranks is another function; a GPT has none.
    job = {**GPT, "model": SMALL_GPT, "precision": "fp64", "mode": "ddp"}
    on_ranks(2, attempt, folder=str(whole), settings=job)
    assert on_ranks(2, attempt, folder=str(parts), settings=job, stop_at=2) == [75, 75]
    stopped = on_ranks(3, attempt, folder=str(parts), settings={**job, "mode": "bucketed"}, number=1, stop_at=4)
    assert stopped == [75] * 3
    assert on_ranks(1, attempt, folder=str(parts), settings={**job, "mode": "single"}, number=2, stop_at=6) == [75]
    assert on_ranks(4, attempt, folder=str(parts), settings=job, number=3) == [0] * 4
    agree_within_rounding(parts, whole)


def test_shared_out_state_moves_between_stages_and_worlds_and_float64_agrees_within_rounding(on_ranks, whole, parts):
    job = {**GPT, "model": SMALL_GPT, "precision": "fp64", "clip_norm": 0.5}
    on_ranks(2, attempt, folder=str(whole), settings={**job, "mode": "bucketed"})
    ways = (("zero3", 4, 1), ("ddp", 1, 2), ("zero1", 3, 3), ("fsdp", 3, 5), ("zero2", 2, 6), ("fsdp", 2, 7))
    move(on_ranks, parts, job, ways)
    last = on_ranks(1, attempt, folder=str(parts), settings={**job, "mode": "zero3"}, number=len(ways))
    assert last == [0]
    agree_within_rounding(parts, whole)


def test_masters_of_shared_out_weights_move_between_stages_and_worlds_without_a_changed_bit(on_ranks, whole, parts):
    job = {**GPT, "precision": "pure_bf16", "exact": True, "virtual_ranks": 4, "clip_norm": 0.5}
    on_ranks(1, attempt, folder=str(whole), settings={**job, "mode": "bucketed"})
    move(on_ranks, parts, job, (("zero1", 2, 2), ("zero3", 4, 4), ("flat", 2, 5)))
    assert on_ranks(2, attempt, folder=str(parts), settings={**job, "mode": "zero2"}, number=3) == [0, 0]
    assert hashes(parts) == hashes(whole)


def test_every_sample_is_seen_once_an_epoch_over_resumes_on_other_worlds(on_ranks, parts):
    # 141 samples; 24 a step make six steps, the last with 21.
    job = {**VGG, "mode": "ddp", "steps": 6}
    on_ranks(2, attempt, folder=str(parts), settings=job, stop_at=2, **FEW)
    on_ranks(3, attempt, folder=str(parts), settings=job, number=1, stop_at=5, **FEW)
    on_ranks(1, attempt, folder=str(parts), settings={**job, "mode": "single"}, number=2, **FEW)
    seen = Counter()
    for path in parts.glob("attempt-*/metrics-*.jsonl"):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            seen[row["step"]] += row["samples"]
    assert seen == {1: 24, 2: 24, 3: 24, 4: 24, 5: 24, 6: 21}
    chosen = newest_good(RunDir(parts))
    assert chosen is not None
    assert (chosen.manifest.meta["samples"], chosen.manifest.meta["epoch"]) == (141, 1)


def test_a_run_that_is_complete_ends_at_once_and_adds_nothing(on_ranks, parts):
    job = {**VGG, "mode": "ddp", "evaluate": True, "steps": 3}
    on_ranks(2, attempt, folder=str(parts), settings=job, **FEW)
    before = (rows(parts), rows(parts, evaluation=True), sorted((parts / "checkpoints").iterdir()))
    assert on_ranks(2, attempt, folder=str(parts), settings=job, number=1, **FEW) == [0, 0]
    assert (rows(parts), rows(parts, evaluation=True), sorted((parts / "checkpoints").iterdir())) == before


def test_an_evaluation_that_is_done_again_stands_in_the_metrics_once(on_ranks, parts):
    job = {**VGG, "mode": "single", "evaluate": True, "steps": 3, "batch_size": 72}
    # Saved after one step; the evaluation after the second is done in both attempts.
    on_ranks(1, attempt, folder=str(parts), settings=job, stop_at=1, **FEW)
    on_ranks(1, attempt, folder=str(parts), settings=job, number=1, **FEW)
    newest = newest_good(RunDir(parts))
    assert newest is not None
    newest.folder.path.rename(newest.folder.trash)
    on_ranks(1, attempt, folder=str(parts), settings=job, number=2, **FEW)
    assert [row["step"] for row in rows(parts)] == [1, 2, 3, 2, 3]
    assert [row["step"] for row in rows(parts, evaluation=True)] == [2, 3]
