"""The settings of `checkpoint:` that ranks need: when to save, and how many checkpoints to keep."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    from muster.jobs.spec.failover import CheckpointSettings


@dataclass(frozen=True)
class PlainPolicy:
    """The settings on a rank whose Python, chosen by the user, may have no pydantic."""

    every_steps: int | None = None  # None: saves are due by time
    every_s: float | Literal["auto"] | None = None  # None or auto: computed from the measured stall and failures
    keep: int = 3  # number of valid checkpoints to keep
    blocking: bool = False  # pause training until a save is committed
    memory_every_steps: int | None = None  # steps between two copies into the memory of the nodes

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> "PlainPolicy":
        """Read the settings that the launcher wrote for the rank."""
        return cls(**{name: record[name] for name in cls.__dataclass_fields__ if name in record})


Policy: TypeAlias = "CheckpointSettings | PlainPolicy"
