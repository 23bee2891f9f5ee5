"""The JSON Schema accepts what the loader accepts; `jsonschema` is the reference for what a schema means."""

from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from muster.jobs.basics.errors import JobFileError
from muster.jobs.spec import yamlfile
from muster.jobs.spec.load import EXAMPLES, load_job
from muster.jobs.spec.modes import MODES
from muster.jobs.spec.schema import job_schema
from muster.launch.common.kinds import KINDS

TRAIN = {"model": "vgg11", "data": "digits"}


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    return job_schema(KINDS)


def test_it_is_a_schema_of_draft_2020_12(schema: dict[str, Any]) -> None:
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_example_fits_the_schema_and_loads(schema: dict[str, Any], path: Path) -> None:
    Draft202012Validator(schema).validate(yamlfile.read(path).value)
    load_job(path, KINDS)


GOOD: list[dict[str, Any]] = [
    {"train": TRAIN},
    {"command": ["python", "x.py"], "nodes": 2, "ranks_per_node": "slots", "env": {"A": "b"}},
    {"train": {"model": {"name": "gpt-nano", "context": 32}, "data": {"text": "/x"}, "mode": "single"}},
    {"train": {**TRAIN, "optimizer": {"lr": 1}, "clip_norm": None}},
]
BAD: list[dict[str, Any]] = [
    {},
    {"nodes": 2},
    {"train": TRAIN, "command": ["x"]},
    {"command": "python x.py"},
    {"command": []},
    {"command": ["x", 1]},
    {"train": TRAIN, "nodes": 0},
    {"train": TRAIN, "nodes": "two"},
    {"train": TRAIN, "nods": 2},
    {"train": TRAIN, "kind": "train"},
    {"train": {**TRAIN, "model": "vgg12"}},
    {"train": {**TRAIN, "model": {"name": "vgg12"}}},
    {"train": {**TRAIN, "data": "digts"}},
    {"train": {**TRAIN, "mode": "alreduce"}},
    {"train": {**TRAIN, "optimizer": {"lr": 0}}},
    {"train": {"model": "vgg11"}},
]


@pytest.mark.parametrize("value", GOOD, ids=str)
def test_schema_and_loader_accept_the_same(schema: dict[str, Any], tmp_path: Path, value: dict[str, Any]) -> None:
    Draft202012Validator(schema).validate(value)
    load_job(_written(tmp_path, value), KINDS)


@pytest.mark.parametrize("value", BAD, ids=str)
def test_schema_and_loader_refuse_the_same(schema: dict[str, Any], tmp_path: Path, value: dict[str, Any]) -> None:
    assert not Draft202012Validator(schema).is_valid(value)
    with pytest.raises(JobFileError):
        load_job(_written(tmp_path, value), KINDS)


def test_the_words_of_the_tables_are_in_it(schema: dict[str, Any]) -> None:
    assert schema["$defs"]["TrainSettings"]["properties"]["mode"]["enum"] == [*MODES]
    assert {"required": ["bench"]} in schema["oneOf"]
    assert not {"kind", "settings"} & set(schema["properties"])


def _written(folder: Path, value: dict[str, Any]) -> Path:
    path = folder / "job.yaml"
    path.write_text(yamlfile.dump(value), encoding="utf-8")
    return path
