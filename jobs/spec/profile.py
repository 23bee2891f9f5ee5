"""`train.profile` of a job file: which steps of every rank to record, if any."""

from typing import Annotated, Any, Final

from pydantic import ConfigDict, Field, model_validator

from muster.jobs.spec.strict import Positive, Strict

MOST_STEPS: Final = 100  # a trace grows by megabytes with every step


def _or_bool(schema: dict[str, Any]) -> None:
    """Allow `true` and `false` in place of the mapping in the schema."""
    mapping = dict(schema)
    schema.clear()
    schema |= {"title": mapping.pop("title"), "anyOf": [{"type": "boolean"}, mapping]}


class ProfileSettings(Strict):
    """`profile:` - true, false, or a mapping (which means true) that selects the steps and what to record."""

    model_config = ConfigDict(json_schema_extra=_or_bool)

    on: bool = Field(False, description="whether to record; default: true if the section is a mapping")
    first_step: Positive = Field(
        6, description="first recorded step of an attempt, counted from 1; earlier steps are the warm-up"
    )
    steps: Annotated[int, Field(ge=1, le=MOST_STEPS)] = Field(3, description="number of recorded steps, in a row")
    stacks: bool = Field(
        False, description="record Python's frames too, in the trace and the flame graph; slows the steps"
    )
    memory: bool = Field(
        True, description="record memory over time, the largest allocations, and a snapshot of CUDA memory"
    )

    @model_validator(mode="before")
    @classmethod
    def _word_or_mapping(cls, value: Any) -> Any:
        if isinstance(value, bool):
            return {"on": value}
        if isinstance(value, dict):
            return {"on": True, **value}
        if isinstance(value, ProfileSettings):
            return value
        raise ValueError(f"must be true, false or a mapping ({', '.join(cls.model_fields)}), got {value!r}")


OFF: Final = ProfileSettings(on=False)
