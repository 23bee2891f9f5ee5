"""The settings of `checkpoint:` that ranks need: when checkpoints are due, and how many are kept."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    from muster.jobs.spec.failover import CheckpointSettings


@dataclass(frozen=True)
class PlainPolicy:
    """Those settings for a Python that lacks pydantic, as a user's may."""

    every_steps: int | None = None  # None: by time
    every_s: float | Literal["auto"] | None = None  # None, auto: from the measured stall and the failures so far
    keep: int = 3  # good checkpoints that stay
    blocking: bool = False  # the ranks wait until a save is committed

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> "PlainPolicy":
        """Read what the launcher wrote for the rank."""
        return cls(**{name: record[name] for name in cls.__dataclass_fields__ if name in record})


Policy: TypeAlias = "CheckpointSettings | PlainPolicy"
