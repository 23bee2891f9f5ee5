"""What every section of a job file or a site file is made of."""

from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field

from muster.jobs.basics.reading import LATEST_S

MOST: Final = 10**12  # steps, samples, sizes: more is a slip of the keyboard
Positive = Annotated[int, Field(ge=1, le=MOST)]
NonNegative = Annotated[int, Field(ge=0, le=MOST)]
Seed = Annotated[int, Field(ge=0, lt=2**64)]
UnixTime = Annotated[float, Field(ge=0, le=LATEST_S)]


class Strict(BaseModel):
    """A frozen section of a file: unknown keys and wrong types are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def as_list(value: Any) -> Any:
    """Return a value that stands where a list may: in a list of its own."""
    return value if isinstance(value, list) else [value]


def one_or_many(schema: dict[str, Any]) -> None:
    """Let an editor take one value where a list may stand."""
    item = schema.pop("items")
    schema.pop("type")
    schema["anyOf"] = [item, {"type": "array", "minItems": schema.pop("minItems", 1), "items": item}]
