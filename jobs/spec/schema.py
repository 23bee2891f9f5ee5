"""The JSON Schema (draft 2020-12) of the job file, for editors, built from the models that validate the file."""

from collections.abc import Sequence
from typing import Any, Final, Literal

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from muster.jobs.models.shapes import GPT_SHAPES, VGG_SHAPES
from muster.jobs.spec.job import CommandSettings, Job, JobKind
from muster.jobs.spec.load import DERIVED
from muster.jobs.spec.modes import MODES
from muster.jobs.spec.train_fields import DATA_NAMES

DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"

# Fields with a fixed set of values: the model has a plain `str` with a check, the schema gets an enum.
WORDS: Final[dict[tuple[str, str], list[str]]] = {
    ("ModelSettings", "name"): [*VGG_SHAPES, *GPT_SHAPES],
    ("DataSettings", "name"): [*DATA_NAMES],
    ("TrainSettings", "mode"): [*MODES],
}
# Sections that can be abbreviated to a name: `model: vgg11` is `model: {name: vgg11}`.
SHORT: Final = ("ModelSettings", "DataSettings")


def job_schema(kinds: Sequence[JobKind]) -> dict[str, Any]:
    """Return the JSON Schema of a job file: the keys of every job, and exactly one section of `kinds`."""
    models: list[tuple[type[BaseModel], Literal["validation"]]] = [(Job, "validation")]
    models += [(kind.settings, "validation") for kind in kinds]
    _, schema = models_json_schema(models, ref_template="#/$defs/{model}")
    definitions: dict[str, Any] = schema["$defs"]
    for (name, field), words in WORDS.items():
        if name in definitions:
            _allow_only(definitions[name]["properties"][field], words)
    for name in SHORT:
        if name in definitions:
            definitions[name] = _or_word(definitions[name], WORDS[name, "name"])
    job = definitions.pop("Job")
    properties = {key: value for key, value in job["properties"].items() if key not in DERIVED}
    properties |= {kind.key: _section(kind, definitions) for kind in kinds}
    definitions.pop("CommandSettings", None)  # `_section` inlines this schema
    return {
        "$schema": DIALECT,
        "title": "Muster job file",
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        "oneOf": [{"required": [kind.key]} for kind in kinds],
        "$defs": {name: definitions[name] for name in sorted(definitions)},
    }


def _section(kind: JobKind, definitions: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of one kind's section. A command is written as a list."""
    if kind.settings is not CommandSettings:
        return {"$ref": f"#/$defs/{kind.settings.__name__}"}
    argv: dict[str, Any] = definitions["CommandSettings"]["properties"]["argv"]
    return {**argv, "title": "Command", "description": "the program and its arguments; every rank starts it"}


def _allow_only(field: dict[str, Any], words: list[str]) -> None:
    """Restrict a text field to the names of a table; null stays allowed if it was."""
    for option in field.get("anyOf", [field]):
        if option.get("type") == "string":
            option["enum"] = words


def _or_word(section: dict[str, Any], words: list[str]) -> dict[str, Any]:
    return {"title": section["title"], "anyOf": [{"type": "string", "enum": words}, section]}
