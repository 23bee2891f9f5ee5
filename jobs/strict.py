"""The base of every section of a job file or a site file."""

from pydantic import BaseModel, ConfigDict


class Strict(BaseModel):
    """A frozen section of a file: unknown keys and wrong types are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
