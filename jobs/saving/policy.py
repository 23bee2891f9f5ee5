"""The settings of `checkpoint:` that ranks need: when checkpoints are due, and how many are kept."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol


class Policy(Protocol):
    """The interface of the settings in `jobs/spec/failover.py`, for a Python that lacks pydantic."""

    @property
    def every_steps(self) -> int | None:
        """Steps between two saves; None: by time."""
        ...

    @property
    def every_s(self) -> float | Literal["auto"] | None:
        """Seconds between two saves; None or `auto`: from the measured stall and the failures so far."""
        ...

    @property
    def keep(self) -> int:
        """Good checkpoints that stay."""
        ...

    @property
    def blocking(self) -> bool:
        """True when the ranks wait until a save is committed."""
        ...


@dataclass(frozen=True)
class PlainPolicy:
    """A policy without pydantic."""

    every_steps: int | None = None
    every_s: float | Literal["auto"] | None = None
    keep: int = 3
    blocking: bool = False

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> "PlainPolicy":
        """Read what the launcher wrote for the rank."""
        return cls(**{name: record[name] for name in cls.__dataclass_fields__ if name in record})
