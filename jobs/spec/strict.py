"""Base class and number types of all sections of job and site files."""

from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field

from muster.jobs.basics.reading import LATEST_S

MOST: Final = 10**12  # limit for steps, samples and sizes: a larger value is a typing error
Positive = Annotated[int, Field(ge=1, le=MOST)]
NonNegative = Annotated[int, Field(ge=0, le=MOST)]
Seed = Annotated[int, Field(ge=0, lt=2**64)]
UnixTime = Annotated[float, Field(ge=0, le=LATEST_S)]


class Strict(BaseModel):
    """A frozen section of a file. Unknown keys and wrong types are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def as_list(value: Any) -> Any:
    """Wrap a single value in a list, for keys that take one value or a list."""
    return value if isinstance(value, list) else [value]


def one_or_many(schema: dict[str, Any]) -> None:
    """Allow one value in place of a list in the schema."""
    item = schema.pop("items")
    schema.pop("type")
    schema["anyOf"] = [item, {"type": "array", "minItems": schema.pop("minItems", 1), "items": item}]
