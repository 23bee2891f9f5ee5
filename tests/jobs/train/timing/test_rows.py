"""Rows that are really timed: tiny models on this CPU, in processes of their own; and what may befall one."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from muster.jobs.basics.boot import CODE_ROOT
from muster.jobs.basics.rowlog import RowLog
from muster.jobs.models.shapes import VGG_SHAPES
from muster.jobs.timing.settings import Case, TimingSettings
from muster.jobs.train.timing import memory, work
from muster.jobs.train.timing.launch_manager import ModelTimer
from muster.jobs.train.timing.work import TimingTask
from muster.jobs.world.world import World
from support.timings import settings

pytestmark = [pytest.mark.ranks, pytest.mark.slow]
CPU = torch.device("cpu")
TINY = {"batch": 2, "context": 16, "vocabulary": 300, "warmup": 1, "steps": 2, "launches": 2, "matmul": False}
MB = 2**20
OWN = Path(CODE_ROOT, "muster/jobs/examples/own")


def stand_still(task: TimingTask) -> Any:
    """Build no step for gpt-nano, in place of `work.build_step`."""
    while task.case.model == "gpt-nano":
        time.sleep(0.05)
    return lambda: None


def devour(task: TimingTask) -> Any:
    """Build a step that takes 32 MB more with each call, in place of `work.build_step`."""
    held: list[torch.Tensor] = []
    return lambda: held.append(torch.ones(8 * MB))


def raises(task: TimingTask) -> Any:
    raise ValueError("a mistake of the model's own")


FAULTS = {
    "stand still": stand_still,
    "devour": devour,
    "raise": raises,
    "abort": lambda task: os.abort(),
    "kill": lambda task: os.kill(os.getpid(), signal.SIGKILL),
}


def conduct(world: World, folder: str, asked: dict[str, Any], fault: str = "", allowed: int = 0) -> list[Any]:
    """Time models as the rank of a job does; return the records."""
    torch.set_num_threads(1)
    if fault:
        work.build_step = FAULTS[fault]
    if allowed:
        memory.allowed_bytes = lambda share: allowed
    path = Path(folder) / "bench.jsonl"
    wanted = TimingSettings.model_validate(asked)
    ModelTimer(wanted, CPU, RowLog(path, patient=False, say=print), name="test").run()
    return [json.loads(line) for line in path.read_text().splitlines()]


def timed(on_ranks, tmp_path, **changes):
    faults = {name: changes.pop(name) for name in ("fault", "allowed") if name in changes}
    asked = {"model": ["gpt-nano", "vgg11"], "passes": ["forward"], **TINY, **changes}
    (records,) = on_ranks(1, conduct, group=False, folder=str(tmp_path), asked=asked, **faults)
    assert [records[0]["record"], records[-1]["record"]] == ["timing", "end"]
    launches = [record for record in records if record["record"] == "timed"]
    return list({(row["model"], row["pass_name"]): row for row in launches}.values()), records  # the newest of each


def test_every_pass_has_its_steps_its_parameters_and_the_memory_it_took(on_ranks, tmp_path):
    rows, records = timed(on_ranks, tmp_path, passes=["forward", "backward", "step"], matmul=True)
    assert [(row["model"], row["pass_name"]) for row in rows] == [
        (model, pass_name) for model in ("gpt-nano", "vgg11") for pass_name in ("forward", "backward", "step")
    ]
    assert {row["state"] for row in rows} == {"ok"}
    assert {(len(row["warm_up_s"]), len(row["steps_s"])) for row in rows} == {(2, 4)}
    assert [len(row["launches"]) for row in rows] == [2] * 6
    assert all(
        row["launches"][0]["time"] < rows[-1]["launches"][0]["time"] < row["launches"][1]["time"] for row in rows[:-1]
    )
    assert all(min(row["warm_up_s"] + row["steps_s"]) > 0.0 for row in rows)
    gpt = settings(**TINY).shape(Case("gpt-nano", "step", "fp32")).parameter_count()
    assert [row["parameters"] for row in rows] == [gpt] * 3 + [VGG_SHAPES["vgg11"].parameter_count()] * 3
    weights = 4 * VGG_SHAPES["vgg11"].parameter_count()  # 35 MB; then gradients beside them, then AdamW's two moments
    for row, held in zip(rows[3:], (1, 2, 4), strict=True):
        assert held * weights <= row["peak_bytes"] <= held * weights + 60 * MB
    (peak,) = [record for record in records if record["record"] == "peak"]
    assert peak["flops_per_s"] > 0
    assert all(row["matmul_share"] == row["flops_per_s"] / peak["flops_per_s"] for row in rows)


def test_what_must_be_held_and_cannot_is_a_row_before_anything_is_made(on_ranks, tmp_path):
    rows, _ = timed(on_ranks, tmp_path, allowed=20 * MB, fault="abort")
    assert [row["state"] for row in rows] == ["failed", "memory"]
    assert rows[1]["reason"].startswith("needs 0.0 GB for weights")
    assert rows[1]["build_s"] is None


def test_memory_that_nobody_foresaw_is_an_error_of_the_row_and_not_of_the_machine(on_ranks, tmp_path):
    rows, _ = timed(on_ranks, tmp_path, allowed=150 * MB, fault="devour", steps=20)
    assert [row["state"] for row in rows] == ["memory"] * 2
    assert 2 <= len(rows[0]["warm_up_s"] + rows[0]["steps_s"]) <= 5  # of 32 MB each
    assert rows[0]["reason"] == "asked for 0.0 GB more than may be used here; use a smaller batch or model"


def test_a_row_whose_time_is_over_is_given_up_and_the_next_one_goes_on(on_ranks, tmp_path):
    rows, _ = timed(on_ranks, tmp_path, fault="stand still", timeout_s=1.0)
    assert [row["state"] for row in rows] == ["timeout", "ok"]
    assert rows[0]["reason"] == "its model was not built in 1 s (--timeout)"


@pytest.mark.parametrize(
    ("fault", "state", "reason"),
    [
        ("raise", "failed", "ValueError: a mistake of the model's own"),
        ("abort", "failed", "was killed by SIGABRT"),
        ("kill", "memory", "was killed by SIGKILL, probably by the kernel because memory ran out"),
    ],
)
def test_a_row_whose_process_fails_says_why(on_ranks, tmp_path, fault, state, reason):
    (row,), _ = timed(on_ranks, tmp_path, model=["gpt-nano"], fault=fault)
    assert row["state"] == state
    assert row["reason"].startswith(reason)


def test_types_of_each_layer_are_told_in_place_of_times(on_ranks, tmp_path):
    rows, records = timed(on_ranks, tmp_path, model="gpt-nano", precision=["fp32", "bf16"], dtypes=True)
    assert rows == []
    plain, cast = (record["layers"] for record in records if record["record"] == "dtypes")
    outputs = {layer["layer"]: (layer["parameters"], layer["output"], layer["gradients"]) for layer in cast}
    assert outputs["block1.mlp.up"] == ("float32", "bfloat16", "float32")
    assert outputs["loss"] == ("-", "float32", "-")
    assert {each for layer in plain for each in (layer["input"], layer["output"])} <= {"float32", "int64", "-"}


def step_and_engine(world: World, precision: str) -> list[bool]:
    """Do a timed step, and a step of the engine that trains, from the same weights on the same batch."""
    from muster.jobs.train.data.loading import MicroInput, ShardInput
    from muster.jobs.train.engine import build_engine
    from muster.jobs.train.models import build_model
    from muster.jobs.train.numerics import numerics_of
    from muster.jobs.train.profiling.clock import clock_for

    asked = TimingSettings.model_validate({"model": ["gpt-nano"], **TINY})
    task = TimingTask(asked, Case("gpt-nano", "step", precision), CPU, 1 << 40)  # type: ignore[arg-type]
    made: list[torch.nn.Module] = []
    build = work.build

    def building(task: TimingTask) -> Any:
        made.append((found := build(task))[0])
        return found

    work.build = building
    step = work.build_step(task)
    step()
    step()
    training = asked.training(task.case)
    numerics = numerics_of(training, CPU)
    model = numerics.place(build_model(training.model, vocabulary=300, seed=training.seed))
    engine = build_engine(training, model, World(0, 1, None, CPU), clock_for(CPU), numerics, (TINY["context"],))
    inputs, targets = work.random_batch(task, numerics)
    for number in range(2):
        engine.train_step(number, [ShardInput(0, (MicroInput(inputs, targets, 2, 1.0),))])
    pairs = zip(made[0].parameters(), engine.module.parameters(), strict=True)
    return [torch.equal(one, other) for one, other in pairs]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "pure_bf16"])
def test_a_timed_step_is_the_step_of_the_engine_to_the_bit(on_ranks, precision):
    (same,) = on_ranks(1, step_and_engine, group=False, precision=precision)
    assert len(same) > 10
    assert all(same)


def conduct_own(world: World, folder: str, asked: dict[str, Any]) -> list[Any]:
    os.chdir(OWN)
    return conduct(world, folder, asked)


def test_the_model_of_a_train_section_is_timed_on_its_data_and_sized_before_it_is_timed(on_ranks, tmp_path):
    section = {"model": {"make": "model/net.py:build", "args": {"width": 32}}, "data": "digits"}
    section["loss"] = "model/net.py:loss"
    asked = {"train": section, "model": "gpt-nano", "passes": ["forward", "step"], **TINY}
    (records,) = on_ranks(1, conduct_own, group=False, folder=str(tmp_path), asked=asked)
    rows = [record for record in records if record["record"] == "timed" and record["is_own"]]
    found = [(row["model"], row["state"], row["context"]) for row in rows[-2:]]
    assert found == [("model/net.py:build", "ok", None)] * 2
    assert {row["parameters"] for row in rows} == {192 * 32 + 32 + 4 * (64 + 2 * 32 * 128 + 128 + 32) + 32 * 10 + 10}
    forward = 2 * TINY["batch"] * (192 * 32 + 4 * 2 * 32 * 128 + 32 * 10)
    assert [row["flops"] for row in rows[-2:]] == [forward, 3 * forward - 2 * TINY["batch"] * 192 * 32]


def test_a_model_that_cannot_be_made_is_a_row_with_the_reason(on_ranks, tmp_path):
    section = {"model": {"make": "model/net.py:biuld"}, "data": "digits"}
    asked = {"train": section, "passes": ["forward"], "batch": 2, "matmul": False}
    (records,) = on_ranks(1, conduct_own, group=False, folder=str(tmp_path), asked=asked)
    (row,) = (record for record in records if record["record"] == "timed")
    assert (row["state"], row["parameters"], row["flops_per_s"]) == ("refused", 0, None)
    assert "has no biuld; did you mean 'build'?" in row["reason"]
