"""Settings that a mode does not read: refused, with file and line, unless the caller accepts them."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from muster.jobs.basics.errors import JobFileError
from muster.jobs.spec.conflicts import READERS, unread
from muster.jobs.spec.job import JobKind
from muster.jobs.spec.load import LoadedJob, load_job
from muster.jobs.spec.modes import MODES
from muster.jobs.spec.train import TrainSettings

KINDS = (JobKind("train", TrainSettings, "somewhere:run", lambda settings, world_size: None, unread),)
GPT = {"model": {"name": "gpt-nano", "tied": False}, "data": "synthetic"}
SPLITS: dict[str, dict[str, Any]] = {name: {"mode": name} for name in MODES} | {
    "pipelines": {"parallel": {"data": 2, "pipe": 2}},
    "flat pipelines": {"parallel": {"data": 2, "pipe": 2, "sync": "flat"}},
    "sharded pipelines": {"parallel": {"data": 2, "pipe": 2, "zero": 2}},
    "tensor x zero1": {"parallel": {"data": 2, "tensor": 2, "zero": 1}},
}
PIPELINES = {
    "model",
    "terapipe",
    "gpipe",
    "1f1b",
    "interleaved",
    "zb1p",
    "zbv",
    "pipelines",
    "flat pipelines",
    "sharded pipelines",
}
SHARDED = {"zero1", "zero2", "zero3", "fsdp", "tensor x zero1"}
# What the wrappers in jobs/train are given, written down a second time.
READ: dict[str, tuple[Any, set[str]]] = {
    "bucket_size_mb": (4.0, {"bucketed", "zero1", "zero2", "pipelines", "sharded pipelines", "tensor x zero1"}),
    "accumulate": ("sharded", SHARDED),
    "reshard_after_forward": (False, {"zero3", "fsdp"}),
    "sequence_parallel": (True, {"tensor", "tensor x zero1"}),
    "microbatches": (2, PIPELINES - {"model"}),
    "chunks": (3, {"interleaved"}),
    "cut": ("count", PIPELINES),
}


def load(tmp_path: Path, train: dict[str, Any], *overrides: str, allow_unread: bool = False) -> LoadedJob:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump({"name": "job", "train": train}, sort_keys=False))
    return load_job(path, KINDS, overrides, allow_unread=allow_unread)


@pytest.mark.parametrize("key", READ)
@pytest.mark.parametrize("split", SPLITS)
def test_a_setting_is_refused_by_the_modes_that_do_not_read_it(tmp_path: Path, split: str, key: str) -> None:
    value, readers = READ[key]
    train = {**GPT, **SPLITS[split], key: value}
    if split in readers:
        assert not load(tmp_path, train).unread
        return
    with pytest.raises(JobFileError, match=rf"job.yaml:\d+: train.{key}: has no effect in mode .*; remove it$"):
        load(tmp_path, train)


@pytest.mark.parametrize(
    ("train", "said"),
    [
        ({"augment": True}, "train.augment: has no effect on text; it is for images; remove it"),
        (
            {"schedule": {"final": 0.1}},
            "train.schedule.final: has no effect with schedule constant; it is for schedules linear",
        ),
        (
            {"parallel": {"pipe": 2, "schedule": "model", "microbatches": 4}},
            "train.parallel.microbatches: has no effect in mode data 1 x pipe 2 by model; it is for pipelines other",
        ),
        (
            {"parallel": {"pipe": 2, "tokens": [64, 64]}, "model": "gpt-nano", "data": "synthetic"},
            "train.parallel.tokens: has no effect in mode data 1 x pipe 2 by 1f1b; it is for schedule terapipe",
        ),
        (
            {"model": {"make": "net.py:build", "vocabulary": 10}, "data": {"make": "net.py:data"}},
            "train.model.vocabulary: has no effect with a model from model.make on this data; it is for "
            "built-in models and data",
        ),
        (
            {"model": {"make": "net.py:build", "context": 10}, "data": {"make": "net.py:data"}},
            "train.model.context: has no effect with a model from model.make on this data; it is for "
            "built-in models and",
        ),
        (
            {"model": {"make": "net.py:build", "units": ["blocks.*"]}, "data": {"make": "net.py:data"}},
            "train.model.units: has no effect in mode ddp; it is for modes zero3 and fsdp, compile and",
        ),
        (
            {"mode": "tensor", "loss": "net.py:loss"},
            "loss: net.py:loss cannot be combined with tensor parallel, which splits",
        ),
        ({"optimizer": {"nesterov": True}}, "train.optimizer: nesterov: true needs a momentum; add momentum: 0.9"),
    ],
)
def test_so_are_other_settings_without_effect(tmp_path: Path, train: dict[str, Any], said: str) -> None:
    with pytest.raises(JobFileError) as caught:
        load(tmp_path, GPT | train)
    assert said in str(caught.value)


def test_every_row_has_a_test() -> None:
    nested = {("schedule", "final"), ("parallel", "microbatches"), ("model", "units"), ("model", "plan")}
    nested |= {("model", "vocabulary"), ("model", "context"), ("parallel", "tokens")}
    others = {("augment",), *nested}
    assert {row.key for row in READERS} == {(key,) for key in READ} | others


def test_a_default_that_is_written_out_is_no_mistake(tmp_path: Path) -> None:
    loaded = load(tmp_path, {**GPT, "mode": "allreduce", "accumulate": "local", "bucket_size_mb": 25.0})
    assert set(loaded.unread) == loaded.idle == {("train", "accumulate"), ("train", "bucket_size_mb")}
    assert loaded.dropped == []


def test_an_override_is_named_as_the_place_of_the_mistake(tmp_path: Path) -> None:
    with pytest.raises(
        JobFileError, match=r"^--set train.chunks=3: train.chunks: has no effect in mode ddp; it is for"
    ):
        load(tmp_path, GPT, "train.chunks=3")


def test_a_caller_that_accepts_them_is_told(tmp_path: Path) -> None:
    loaded = load(tmp_path, {**GPT, "cut": "count"}, allow_unread=True)
    assert [str(each).partition(": ")[2] for each in loaded.dropped] == [
        "train.cut: has no effect in mode ddp; it is for pipelines"
    ]
