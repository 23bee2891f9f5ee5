"""A checked job as plain values, for ranks whose Python has torch but neither pydantic nor yaml.

The launcher serializes the job (`spelled`) and a rank reads it back (`plain_job`). A section becomes four entries:

    values    {key: value}, with defaults filled in
    sections  {key: a section within this one}
    given     keys that the file sets
    changed   keys whose value is not the default
"""

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, Final, cast

from muster.jobs.basics.sections import PlainSection
from muster.jobs.spec.model_rules import ModelRules
from muster.jobs.spec.rules import TrainRules

if TYPE_CHECKING:
    from pydantic import BaseModel

    from muster.jobs.spec.job import Job

OF_RANKS: Final = ("name", "start_timeout_s", "checkpoint", "settings")  # the keys of a job that ranks read


class PlainModel(PlainSection, ModelRules):
    """`train.model` on a rank."""


class PlainTrain(PlainSection, TrainRules):
    """`train:` on a rank."""


CLASSES: Final[Mapping[str, type[PlainSection]]] = {
    "settings": PlainTrain,
    "model": PlainModel,
}  # sections without a row here have no rules


def spelled(job: "Job") -> dict[str, Any]:
    """Serialize the part of a `train:` job that ranks read."""
    return _spelled(job, OF_RANKS)


def _spelled(section: "BaseModel", keys: Collection[str]) -> dict[str, Any]:
    sections = {key: value for key in keys if hasattr(type(value := getattr(section, key)), "model_fields")}
    return {
        "values": section.model_dump(mode="json", include={*keys} - {*sections}),
        "sections": {key: _spelled(value, tuple(type(value).model_fields)) for key, value in sections.items()},
        "given": sorted(section.model_fields_set & {*keys}),
        "changed": sorted(section.model_dump(exclude_defaults=True).keys() & {*keys}),
    }


def plain_job(record: Mapping[str, Any]) -> "Job":
    """Read back the result of `spelled`."""
    return cast("Job", _section("", record))


def _section(name: str, record: Mapping[str, Any]) -> PlainSection:
    within = {key: _section(key, each) for key, each in record["sections"].items()}
    values = {**record["values"], **within}
    return CLASSES.get(name, PlainSection)(values, record["given"], record["changed"])
