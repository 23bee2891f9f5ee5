"""What real ranks record while they train, and that a training does not mind."""

import json
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from muster.jobs.basics.files import mode_in, read_lines
from muster.jobs.node import page
from muster.jobs.node.reports import Reporter
from muster.jobs.runfolder.rundir import RunDir
from muster.jobs.spec.train import TrainSettings
from muster.jobs.trace.chrome import read_document
from muster.jobs.trace.events import Event, read_trace
from muster.jobs.train.data import open_data
from muster.jobs.train.loop import train
from muster.jobs.train.metrics import Files
from muster.jobs.train.profiling import recorder
from muster.jobs.train.profiling.marking import subject_of
from muster.jobs.train.profiling.recorder import NOT_PROFILING, ProfileRecorder
from muster.jobs.train.trainer import Trainer, build_trainer
from muster.jobs.world.world import World
from muster.launch.look.profiles import read_flame, read_profiles

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

MODEL = {"d_model": 64, "d_ff": 256, "layers": 3, "heads": 4, "context": 64, "vocabulary": 128}
GPT = {"model": MODEL, "data": "synthetic", "batch_size": 16, "evaluate": False, "device": "cpu", "log_every": 2}
PROFILE = {"first_step": 3, "steps": 2}
FILES = {"trace.json.gz", "flame.svg", "flame.json", "operators.txt", "operators.csv", "profile.json"}


def record(
    world: World, folder: str, settings: dict, first: int = 0, stop_at: int | None = None, long: bool = False
) -> str | None:
    """Train and profile; return what is said at the end. `long`: backwards last as `lengthen` says."""
    job = TrainSettings.model_validate({**GPT, **settings})
    trainer = build_trainer(job, open_data(job), world)
    page.own = page.Page()  # the one that the ranks' parent has is shared with all of them
    if stop_at is not None:
        page.own.stop_at = stop_at
    if long:
        lengthen(trainer.engine.module)
    profiling = recorder_of(RunDir(Path(folder)), trainer, first) if job.profile.on else NOT_PROFILING
    attempt = RunDir(Path(folder)).attempt(0)
    attempt.path.mkdir(exist_ok=True)
    train(trainer, Files(attempt.metrics(world.rank), None), Reporter({}), attempt=0, first=first, profiling=profiling)
    assert page.own.phase == page.Phase.END
    assert trainer.clock.listener is None
    return profiling.summary


def lengthen(module: nn.Module) -> None:
    """Let the end of every backward compute until a collective is over that began in it, however late it is taken up.

    If none has begun by then, it gives up after some seconds.
    """
    works: list[dist.Work] = []
    all_reduce = dist.all_reduce

    def noted(*arguments: Any, **settings: Any) -> dist.Work | None:
        work = all_reduce(*arguments, **settings)
        works.extend([work] if work is not None else [])
        return work

    def hold(_: torch.Tensor) -> None:
        deadline, numbers = time.monotonic() + 5.0, torch.ones(256, 256)
        while not any(work.is_completed() for work in works) and time.monotonic() < deadline:
            numbers @ numbers

    dist.all_reduce = noted
    module.register_forward_pre_hook(lambda *_: works.clear())
    next(module.parameters()).register_hook(hold)  # the last to have its gradient, but for what it is tied to


def recorder_of(run: RunDir, trainer: Trainer, first: int) -> ProfileRecorder:
    world, settings = trainer.world, trainer.settings
    facts = {"rank": world.rank, "world_size": world.size, "attempt": 0, "mode": settings.mode, "host": "h"}
    facts |= {"device": world.device.type}
    folder = run.attempt(0).profile(world.rank)
    subject = subject_of(trainer.engine, settings)
    return ProfileRecorder(
        settings.profile, folder, trainer.clock, world.device, facts, subject=subject, done=first, steps=trainer.steps
    )


def records(folder: Path, ranks: int = 2) -> list[dict]:
    paths = [RunDir(folder).attempt(0).profile(rank).record for rank in range(ranks)]
    return [json.loads(path.read_text()) for path in paths]


def events_of(folder: Path, rank: int, name: str) -> list[Event]:
    trace = read_trace(read_document(RunDir(folder).attempt(0).profile(rank).trace)["traceEvents"])
    every = [event for events in trace.host.values() for event in events] + trace.in_flight
    return [event for event in every if event.name == name]


def test_a_synchronous_mode_hides_nothing_and_everything_is_written(on_ranks, tmp_path):
    settings = {"mode": "allreduce", "steps": 6, "profile": PROFILE}
    said = on_ranks(2, record, folder=str(tmp_path), settings=settings)
    assert said[0].startswith("profiled steps 3-4, 0% of rank 0's communication hidden: ")
    for rank, written in enumerate(records(tmp_path)):
        folder = RunDir(tmp_path).attempt(0).profile(rank)
        assert {path.name for path in folder.path.iterdir()} == FILES
        assert {path.stat().st_mode & 0o777 for path in folder.path.iterdir()} == {mode_in(folder.path)}
        assert {*written["files"], "profile.json"} == FILES
        assert [step["step"] for step in written["steps"]] == [3, 4]
        assert all(step["communication_s"] > 0.0 for step in written["steps"])
        assert [step["overlap"] for step in written["steps"]] == [0.0, 0.0]
        assert written["overlap"] == 0.0
        assert {"data", "forward", "backward", "communication", "optimizer"} == written["phases"].keys()
        assert "aten::mm" in {row["name"] for row in written["operators"]}
        assert 0.0 < written["matmul_share"] < 1.0
        assert written["memory"]["host_peak_bytes"] > 2**20
        ElementTree.parse(folder.flame)
        for phase in ("forward", "backward"):
            assert len(events_of(tmp_path, rank, phase)) == 2
        profiled = [row.get("profile") for row in read_lines(RunDir(tmp_path).attempt(0).metrics(rank))]
        assert profiled == [None, "warm-up", "recorded", "recorded", "written", None]


def test_modules_add_up_and_the_logits_are_among_the_largest_allocations(on_ranks, tmp_path):
    on_ranks(2, record, folder=str(tmp_path), settings={"mode": "zero2", "steps": 5, "profile": PROFILE})
    for rank, written in enumerate(records(tmp_path)):
        marked = written["phases"]["forward"] + written["phases"]["backward"]
        assert written["modules"].keys() == {"attention", "mlp", "norm", "embedding", "head", "loss", "other"}
        assert sum(written["modules"].values()) == pytest.approx(marked)
        assert all(seconds > 0.0 for seconds in written["modules"].values())
        assert {"matmul", "elementwise", "normalization", "softmax"} <= written["kinds"].keys()

        points = written["memory_over_time"]
        assert len(points) <= 2000
        assert [time for time, _ in points] == sorted(time for time, _ in points)
        alive = written["allocations"]
        assert [each["bytes"] for each in alive] == sorted((each["bytes"] for each in alive), reverse=True)
        assert sum(each["bytes"] for each in alive) <= max(held for _, held in points)
        predictions = 16 // 2 * MODEL["context"] * MODEL["vocabulary"] * 4
        assert any(each["bytes"] == predictions and each["operator"] == "aten::cross_entropy_loss" for each in alive)
        assert any(each["operator"] == "parameters" and each["step"] == 0 for each in alive)
        assert points[0][1] == 4 * 160_192  # parameters: between steps no gradient is held, and sgd has no state

        (profile,) = [each for each in read_profiles(RunDir(tmp_path), None)[1] if each.rank == rank]
        assert profile.left_out == ()
        root, *frames = read_flame(profile)
        assert root.us == pytest.approx(sum(step["seconds"] for step in written["steps"]) * 1e6, rel=0.5)
        assert {"data", "forward", "backward", "optimizer"} <= {each.name for each in frames if each.depth == 1}
        assert "block2.attention" in {each.name for each in frames}


@pytest.mark.parametrize(
    ("settings", "modules"),
    [
        ({"mode": "zb1p", "microbatches": 2, "batch_size": 4}, {"mlp", "attention", "norm", "other"}),
        ({"mode": "single", "activation_checkpointing": True}, {"mlp", "attention", "norm", "head", "loss", "other"}),
    ],
    ids=["pipeline", "checkpointing"],
)
def test_modules_of_stages_and_of_blocks_that_run_forward_twice(on_ranks, tmp_path, settings, modules):
    ranks = 2 if settings["mode"] == "zb1p" else 1
    on_ranks(ranks, record, folder=str(tmp_path), settings={**settings, "steps": 4, "profile": PROFILE})
    assert all(modules <= written["modules"].keys() for written in records(tmp_path, ranks))
    has = [written["modules"].keys() & {"embedding", "head", "loss"} for written in records(tmp_path, ranks)]
    assert has == ([{"embedding"}, {"head", "loss"}] if ranks == 2 else [{"embedding", "head", "loss"}])


def test_of_compiled_and_replayed_modules_it_says_that_they_are_not_known():
    job = TrainSettings.model_validate({**GPT, "mode": "single"})
    engine = build_trainer(job, open_data(job), World(0, 1, None, torch.device("cpu"))).engine
    for key in ("compile", "cuda_graph"):
        note = subject_of(engine, job.model_copy(update={key: True})).note
        assert note.startswith(f"module kinds are unknown: train.{key} ")
    assert subject_of(engine, job).note == ""


@pytest.mark.parametrize(
    "settings", [{"mode": "overlap"}, {"mode": "bucketed", "bucket_size_mb": 0.1}], ids=["overlap", "bucketed"]
)
def test_a_mode_that_overlaps_communicates_before_the_backward_has_ended(on_ranks, tmp_path, settings):
    on_ranks(2, record, folder=str(tmp_path), settings={**settings, "steps": 4, "profile": PROFILE}, long=True)
    for rank, written in enumerate(records(tmp_path)):
        assert 0.0 < written["overlap"] <= 1.0
        flights = events_of(tmp_path, rank, "gloo:all_reduce")
        for backward in events_of(tmp_path, rank, "backward"):
            assert any(backward.start_us < flight.start_us < backward.end_us for flight in flights)


def test_a_profile_changes_no_number(on_ranks, tmp_path):
    losses = []
    for name, profile in (("off", False), ("on", {**PROFILE, "stacks": True})):
        folder = tmp_path / name
        folder.mkdir()
        settings = {"mode": "bucketed", "steps": 5, "profile": profile}
        on_ranks(2, record, folder=str(folder), settings=settings)
        losses.append([row["loss"] for row in read_lines(RunDir(folder).attempt(0).metrics(0))])
    assert losses[0] == losses[1]
    flame = RunDir(tmp_path / "on").attempt(0).profile(0).flame.read_text()
    assert "nn.Module: " in flame  # Python's frames


def test_ranks_told_to_stop_within_the_window_write_what_they_have(on_ranks, tmp_path):
    settings = {"mode": "allreduce", "steps": 20, "profile": {"first_step": 3, "steps": 5}}
    on_ranks(2, record, folder=str(tmp_path), settings=settings, stop_at=4)
    assert [[step["step"] for step in each["steps"]] for each in records(tmp_path)] == [[3, 4], [3, 4]]


def test_a_rank_told_to_stop_before_the_window_says_so(on_ranks, tmp_path):
    settings = {"mode": "single", "steps": 20, "profile": {"first_step": 3, "steps": 5}}
    said = on_ranks(1, record, folder=str(tmp_path), settings=settings, stop_at=2)
    assert said == ["not profiled: stopped before step 3 was done"]
    assert RunDir(tmp_path).attempt(0).profiled_ranks() == []


def test_a_resumed_attempt_counts_its_own_steps_and_a_short_one_takes_what_there_is(on_ranks, tmp_path):
    settings = {"mode": "single", "steps": 12, "profile": {"first_step": 5, "steps": 2}}
    (said,) = on_ranks(1, record, folder=str(tmp_path), settings=settings, first=9)
    assert [step["step"] for step in records(tmp_path, 1)[0]["steps"]] == [11, 12]
    assert said.endswith(
        "train.profile asks for 2 steps from step 5 of an attempt; this one has 3, so its last 2 are recorded, "
        "after 1 warm-up step"
    )
    assert records(tmp_path, 1)[0]["overlap"] is None


def break_recorder(world: World, folder: str, settings: dict) -> str | None:
    """Profile while the writing fails."""

    def fail(*arguments: object) -> dict:
        raise OSError("no space left")

    recorder.write_profile = fail
    return record(world, folder, settings)


def test_a_profile_that_cannot_be_written_ends_no_training(on_ranks, tmp_path):
    settings = {"mode": "single", "steps": 6, "profile": PROFILE}
    assert on_ranks(1, break_recorder, folder=str(tmp_path), settings=settings) == [
        "not profiled: OSError: no space left"
    ]
    assert len(list(read_lines(RunDir(tmp_path).attempt(0).metrics(0)))) == 6


def test_off_it_leaves_the_clock_alone():
    assert NOT_PROFILING.word is None
    assert NOT_PROFILING.summary is None
    assert not TrainSettings.model_validate(GPT).profile.on
