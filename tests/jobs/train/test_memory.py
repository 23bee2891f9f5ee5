"""What ranks say of their memory: storages counted by kind, against the formulas; and that a training does not mind."""

import itertools
import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from muster.collectives_bench.cost.memory import memories_of
from muster.jobs.basics.errors import StorageError
from muster.jobs.basics.files import read_lines
from muster.jobs.models.shapes import POOL, VGG_SHAPES, VggShape
from muster.jobs.node import page
from muster.jobs.node.reports import Reporter
from muster.jobs.runfolder.memory_rows import KINDS
from muster.jobs.runfolder.rundir import RunDir
from muster.jobs.spec.job import Job
from muster.jobs.spec.train import TrainSettings
from muster.jobs.train.data import open_data
from muster.jobs.train.loop import train
from muster.jobs.train.memory import gauge, recorder
from muster.jobs.train.memory.held import bytes_by_kind, tensors_of
from muster.jobs.train.memory.recorder import MemoryRecorder
from muster.jobs.train.metrics import Files
from muster.jobs.train.numerics.masters import MasterWeights
from muster.jobs.train.trainer import build_trainer
from muster.jobs.world.world import World
from muster.launch.bench.loads import load_of
from muster.launch.bench.own_split import own_split
from muster.launch.look.memories import RankMemory, formula_of, read_memories

pytestmark = pytest.mark.slow

SMALL_VGG = VggShape("vgg-small", (16, POOL, 32, POOL, 48, POOL, 48, POOL, 64, POOL))
MODEL = {"d_model": 64, "d_ff": 256, "layers": 3, "heads": 4, "context": 32, "vocabulary": 128}
COMMON = {"data": "synthetic", "batch_size": 8, "steps": 2, "evaluate": False, "device": "cpu", "log_every": 4}
GPT = {"model": MODEL, "optimizer": {"name": "adamw"}, **COMMON}
VGG = {"model": "vgg-small", "optimizer": {"name": "sgd", "momentum": 0.9}, **COMMON}
CASES = {
    "gpt bucketed": GPT | {"mode": "bucketed"},
    "gpt zero1": GPT | {"mode": "zero1"},
    "gpt zero2": GPT | {"mode": "zero2", "grad_accumulation": 2},
    "gpt zero2 in small buckets": GPT | {"mode": "zero2", "bucket_size_mb": 0.1},
    "gpt zero3": GPT | {"mode": "zero3"},
    "gpt zero3, kept": GPT | {"mode": "zero3", "reshard_after_forward": False, "activation_checkpointing": True},
    "gpt zero3 in 16 bits": GPT | {"mode": "zero3", "precision": "pure_bf16"},
    "gpt fsdp": GPT | {"mode": "fsdp"},
    "vgg ddp": VGG | {"mode": "ddp"},
    "vgg zero1 in 16 bits": VGG | {"mode": "zero1", "precision": "pure_bf16"},
    "vgg zero3": VGG | {"mode": "zero3"},
}
ON_FOUR = ("gpt zero1", "gpt zero2 in small buckets", "gpt zero3", "vgg zero3")
PIPES = {"data": 2, "pipe": 2, "microbatches": 2}
PRODUCTS = {
    "gpt 1f1b, its head the embedding": GPT | {"mode": "1f1b", "cut": ["block1", "block2", "block3"]},
    "gpt bucketed": GPT | {"parallel": PIPES, "cut": ["block3"]},
    "gpt zero2 in 16 bits": GPT | {"parallel": PIPES | {"zero": 2}, "precision": "pure_bf16"},
    "gpt tensor": GPT | {"parallel": {"data": 2, "tensor": 2, "zero": 1}},
    "gpt tensor x pipe": GPT | {"parallel": {"pipe": 2, "tensor": 2, "microbatches": 2}, "sequence_parallel": True},
    "vgg zero1": VGG | {"parallel": PIPES | {"zero": 1, "schedule": "zbv"}, "cut": "parameters"},
}


def record(world: World, folder: str, cases: dict) -> None:
    """Train in one mode after the other, each into a run folder of its own."""
    VGG_SHAPES["vgg-small"] = SMALL_VGG
    page.own = page.Page()  # the one that the ranks' parent has is shared with all of them
    for name, settings in cases.items():
        job = TrainSettings.model_validate(settings)
        attempt = RunDir(Path(folder) / name).attempt(0)
        facts = {"rank": world.rank, "world_size": world.size, "attempt": 0, "mode": job.mode, "host": "h"}
        watching = MemoryRecorder(attempt.memory(world.rank), world.device, {**facts, "device": world.device.type})
        trainer = build_trainer(job, open_data(job), world)
        watching.watch(trainer.engine)
        with watching:
            own = Path(folder, name, "metrics.jsonl") if world.rank == 0 else None
            train(trainer, Files(attempt.metrics(world.rank), own), Reporter({}), attempt=0)
        assert not trainer.engine.optimizer._optimizer_step_pre_hooks


def folders(root: Path, cases: dict) -> dict[str, RunDir]:
    made = {name: RunDir(root / name) for name in cases}
    for name, run in made.items():
        run.attempt(0).path.mkdir(parents=True)
        job = {"name": "memory", "train": cases[name]}
        run.job.write_text(json.dumps(job))
    return made


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("world_size", "cases"),
    [(2, CASES), (4, {name: CASES[name] for name in ON_FOUR}), (4, PRODUCTS)],
    ids=["two", "four", "pipelines"],
)
def test_what_ranks_hold_is_what_the_formulas_say(on_ranks, tmp_path, monkeypatch, world_size, cases):
    monkeypatch.setitem(VGG_SHAPES, "vgg-small", SMALL_VGG)
    runs = folders(tmp_path, cases)
    on_ranks(world_size, record, folder=str(tmp_path), cases=cases)
    wrong = []
    for name, run in runs.items():
        _, memories = read_memories(run, None)
        assert [each.rank for each in memories] == list(range(world_size))
        for memory in memories:
            formula = formula_of(run, memory)
            assert formula is not None
            for kind in KINDS:
                found, expected = memory.held[kind], getattr(formula, kind)
                if abs(found - expected) > 0.05 * expected:
                    wrong.append(f"{name}, rank {memory.rank}: {kind} {found}, expected {expected}")
    assert wrong == []


PIPED = {"pipe": 2, "microbatches": 4}
LIVE = {
    "1f1b": GPT | {"parallel": PIPED},
    "gpipe, recomputed": GPT | {"parallel": PIPED | {"schedule": "gpipe"}, "activation_checkpointing": True},
    "zb1p": GPT | {"parallel": PIPED | {"schedule": "zb1p"}},
}


def most_alive(world: World, folder: str, cases: dict) -> list[int]:
    """Train, and return how many bytes of tensors were there at most in the third step, as PyTorch counts them."""
    found = []
    for settings in cases.values():
        job = TrainSettings.model_validate(settings)
        trainer = build_trainer(job, open_data(job), world)
        steps, engine = trainer.own_steps(), trainer.engine
        for step in range(2):
            engine.train_step(step, steps[step].shards)
        engine.optimizer.zero_grad(set_to_none=True)
        before, shards = sum(bytes_by_kind(engine.held_tensors()).values()), steps[2].shards
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            engine.train_step(2, shards)
        profiled.export_chrome_trace(f"{folder}/{world.rank}.json")
        rows = json.loads(Path(folder, f"{world.rank}.json").read_text())["traceEvents"]
        changes = [row["args"]["Bytes"] for row in rows if row.get("name") == "[memory]"]
        found.append(before + max(itertools.accumulate(changes)))
    return found


@pytest.mark.ranks
def test_tensors_of_a_pipeline_s_step_are_at_most_what_the_formula_says(on_ranks, tmp_path):
    wrong = []
    for rank, found in enumerate(on_ranks(2, most_alive, folder=str(tmp_path), cases=LIVE)):
        for (name, settings), most in zip(LIVE.items(), found, strict=True):
            job = Job(name="m", kind="train", nodes=2, settings=TrainSettings.model_validate(settings))
            every = memories_of(*own_split(job.settings, load_of(job, ranks=2, backend="gloo")))
            if not 0.8 < most / every[rank].total < 1.15:
                wrong.append(f"{name}, rank {rank}: {most}, expected {every[rank].total}")
    assert wrong == []


@pytest.mark.ranks
def test_a_record_has_three_steps_and_the_end_and_a_shorter_training_fewer(on_ranks, tmp_path):
    cases = {"long": GPT | {"mode": "zero3", "steps": 4}, "short": GPT | {"mode": "zero2"}}
    runs = folders(tmp_path, cases)
    on_ranks(2, record, folder=str(tmp_path), cases=cases)
    points = {name: [(row["point"], row.get("step")) for row in rows(run)] for name, run in runs.items()}
    steps = [(point, step) for step in (1, 2, 3) for point in ("before_step", "after_step")]
    assert points["long"] == [("baseline", None), ("init", None), *steps, ("end", None)]
    assert points["short"] == [("baseline", None), ("init", None), *steps[:4], ("end", None)]
    first, init, before, after = rows(runs["long"])[:4]
    assert init["held"]["optimizer"] > 0
    assert init["held"]["gradients"] == 0
    assert before["held"]["gradients"] > 0
    assert sum(before["held"].values()) <= before["used"] <= before["peak"]["rss"] - first["now"]["rss"] + 2**24
    assert "used" not in init | after
    assert after["peak"]["rss"] >= after["now"]["rss"] > first["now"]["rss"]
    assert rows(runs["long"])[-1]["peak"]["rss"] == max(row["peak"]["rss"] for row in rows(runs["long"])[1:])


def rows(run: RunDir, rank: int = 0) -> list[dict]:
    return list(read_lines(run.attempt(0).memory(rank)))


def test_a_peak_that_was_set_back_still_counts_for_all_of_the_process():
    cpu = torch.device("cpu")
    gauge.since(cpu)
    before = gauge.now(cpu)["rss"]
    torch.ones(16 * 2**20)  # 64 MB, gone at once
    assert gauge.since(cpu)["rss"] > before + 2**25
    assert gauge.since(cpu)["rss"] < gauge.overall(cpu)["rss"]
    assert gauge.overall(cpu)["rss"] > before + 2**25


def test_views_are_one_storage_and_what_two_kinds_share_counts_in_the_first():
    flat = torch.zeros(100)
    held = {"parameters": [flat[:40], flat[40:]], "gradients": [flat, torch.zeros(3)], "buffers": [torch.zeros(2, 2)]}
    assert bytes_by_kind(held) == {"parameters": 400, "gradients": 12, "optimizer": 0, "buffers": 16}


def test_memory_that_was_given_back_is_nothing():
    flat = torch.zeros(100)
    view = flat[:10]
    flat.untyped_storage().resize_(0)
    assert bytes_by_kind({"parameters": [flat, view]})["parameters"] == 0


def test_masters_are_the_optimizers():
    module = nn.Linear(8, 4, bias=False).to(torch.bfloat16)
    optimizer = MasterWeights(module.parameters(), lambda own: torch.optim.SGD(own, lr=0.1, momentum=0.9))
    module(torch.ones(1, 8, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    found = bytes_by_kind(tensors_of(module, optimizer))
    assert found == {"parameters": 64, "gradients": 64, "optimizer": 2 * 128, "buffers": 0}


class Engine:
    """A model of one weight and its optimizer, as far as a recorder asks."""

    graph_bytes = 0

    def __init__(self) -> None:
        self.module = nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1)

    def held_tensors(self) -> dict:
        return tensors_of(self.module, self.optimizer)


def test_a_disk_that_takes_no_row_ends_the_record_and_not_the_training(tmp_path, monkeypatch, capsys):
    full = False

    def append(path: Path, row: dict) -> None:
        written.append(row["point"])
        if full:
            raise StorageError(f"{path}: the disk is full; free some space")

    written: list[str] = []
    monkeypatch.setattr(recorder, "append_line", append)
    engine, watching = Engine(), MemoryRecorder(tmp_path / "m.jsonl", torch.device("cpu"), {})
    watching.watch(engine)
    full = True
    with watching:
        engine.optimizer.step()
        engine.optimizer.step()
    assert written == ["baseline", "init", "before_step"]
    assert capsys.readouterr().err.count("memory of this rank is no longer recorded") == 1


def test_a_training_that_fails_says_what_it_had(tmp_path):
    path = tmp_path / "memory-00000.jsonl"
    engine, watching = Engine(), MemoryRecorder(path, torch.device("cpu"), {"rank": 0})
    watching.watch(engine)
    engine.optimizer.step()
    with pytest.raises(RuntimeError, match="out of memory"), watching:
        raise RuntimeError("out of memory")
    assert [row["point"] for row in read_lines(path)] == ["baseline", "init", "before_step", "after_step", "end"]


def test_what_is_read_back_is_by_how_much_a_rank_has_grown(tmp_path):
    run = RunDir(tmp_path / "run")
    run.attempt(0).path.mkdir(parents=True)
    facts = {"rank": 0, "world_size": 1, "attempt": 0, "mode": "single", "device": "cpu", "host": "h"}
    watching = MemoryRecorder(run.attempt(0).memory(0), torch.device("cpu"), facts)
    taken = torch.ones(16 * 2**20)
    engine = Engine()
    watching.watch(engine)
    with watching:
        engine.optimizer.step()
    (found,) = read_memories(run, None)[1]
    assert isinstance(found, RankMemory)
    assert found.rest == pytest.approx(taken.nbytes, rel=0.2)
    assert found.peak >= 0.9 * taken.nbytes
    assert formula_of(run, found) is None  # no job file
