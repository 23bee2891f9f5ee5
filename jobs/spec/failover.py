"""`checkpoint:` and `restart:` of a job file: when to save, and how a run reacts to failures."""

from typing import Annotated, Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from muster.jobs.spec.strict import NonNegative, Positive, Strict


class CheckpointSettings(Strict):
    """`checkpoint:` - when to save the state of a training job, and how many checkpoints to keep.

    Without `every_steps` and `every_s`, the interval follows from how long a save stalls training and how often the run
    has failed (Young and Daly, `jobs/checkpoint/interval.py`). The state at the end of training is always saved.
    """

    every_steps: Positive | None = Field(None, description="steps between two saves", examples=[200])
    every_s: Annotated[float, Field(gt=0.0)] | Literal["auto"] | None = Field(
        None,
        description="seconds between two saves; `auto`, the default: computed from how long a save stalls training and "
        "how often the run has failed (Young and Daly)",
        examples=["auto", 300],
    )
    keep: Annotated[int, Field(ge=2)] = Field(3, description="number of good checkpoints to keep, at least 2")
    blocking: bool = Field(False, description="pause training until a save is committed")
    memory_every_steps: Positive | None = Field(
        None,
        description="steps between two copies of the state into the memory of the nodes: every node keeps its own part "
        "and that of another node, from which a restart continues",
        examples=[10],
    )

    @model_validator(mode="after")
    def _is_one_interval(self) -> Self:
        if self.every_steps is not None and self.every_s is not None:
            raise ValueError("give every_steps or every_s, not both")
        return self


class RestartSettings(Strict):
    """`restart:` - how a run reacts when a rank, a node or the allocation fails."""

    max: NonNegative = Field(5, description="maximum number of restarts; preemptions do not count")
    min_nodes: Positive | None = Field(None, description="minimum number of nodes to continue with; default: all")
    spares: NonNegative = Field(0, description="extra nodes, besides `nodes`, to replace lost ones")
    backoff: Annotated[float, Field(ge=0.0)] = Field(
        0.5,
        description="seconds to wait before the second restart in a row without a new checkpoint; doubles with each "
        "further one, up to 60",
    )
    in_place: Literal["auto", False] = Field(
        False,
        description="`auto`: if ranks or nodes are lost, and the others have all of the state, they continue with the "
        "next step, without a restart; with ZeRO, from the last copies in memory (`memory_every_steps`)",
        examples=["auto"],
    )
