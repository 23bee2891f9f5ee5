"""`parallel:` of a `train:` section: the number of ranks along each axis of the split.

Ranks that average gradients are adjacent; ranks of one pipeline are not (`pipe/mesh.py`). With data: 2, pipe: 3

    rank          0  1     2  3     4  5
    stage         0  0     1  1     2  2
    data rank     0  1     0  1     0  1       reads its own half of the batch
"""

from typing import Annotated, Any, Final

from pydantic import Field, field_validator, model_validator
from typing_extensions import Self

from muster.jobs.spec.modes import PipelineName, Sync, Zero
from muster.jobs.spec.strict import Positive, Strict
from muster.jobs.spec.yamlfile import show

UNDER_A_PIPELINE: Final = ("flat", "bucketed", "sharded")  # values of sync that work in a pipeline


class ParallelSettings(Strict):
    """A split that no mode has. The product of its degrees must be the number of ranks of the job."""

    data: Positive = Field(1, description="data-parallel ranks: parts of the batch")
    pipe: Positive = Field(1, description="stages of a pipeline")
    tensor: Positive = Field(1, description="GPT: ranks among which every layer is divided")
    zero: Zero = Field(0, description="ZeRO stage: 1 to 3 with sync: sharded (then the default), 3 with sync: fsdp")
    sync: Sync = Field("ddp", description="how gradients are averaged; in a pipeline: flat, bucketed or sharded")
    schedule: PipelineName | None = Field(None, description="the schedule of a pipeline; default: 1f1b if pipe > 1")
    microbatches: Annotated[int, Field(ge=1)] | None = Field(None, description="as train.microbatches")
    tokens: list[Positive] | None = Field(
        None,
        description="schedule terapipe: lengths of the slices of a sequence; default: 4 of equal length",
        examples=[[512, 256, 256]],
    )

    @field_validator("zero", mode="before")
    @classmethod
    def _is_a_number(cls, zero: Any) -> Any:
        if type(zero) in (bool, float):  # Literal would accept true and 1.0, because both equal 1
            raise ValueError(f"must be 0, 1, 2 or 3, got {show(zero)}")
        return zero

    @model_validator(mode="before")
    @classmethod
    def _shares_out(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        more: dict[str, Any] = {}
        if given.get("schedule") is None:  # null means the default, as for every key that may be null
            given = {key: value for key, value in given.items() if key != "schedule"}
            if given.get("pipe", 1) != 1:
                more["schedule"] = "1f1b"
        if "sync" not in given:
            if given.get("zero"):
                more["sync"] = "sharded"
            elif given.get("schedule", more.get("schedule")):
                more["sync"] = "none" if given.get("data", 1) == 1 else "bucketed"
            elif given.get("tensor", 1) != 1 and given.get("data", 1) == 1:
                more["sync"] = "none"
        return {**more, **({"zero": 3} if given.get("sync") == "fsdp" else {}), **given}

    @model_validator(mode="after")
    def _is_one_way(self) -> Self:
        stages = {"sharded": (1, 2, 3), "fsdp": (3,)}.get(self.sync, (0,))
        if self.zero not in stages:
            raise ValueError(
                f"zero: {self.zero} cannot be combined with sync: {self.sync}; sharded needs zero 1, 2 or 3, fsdp 3, "
                "all others 0"
            )
        return self

    @model_validator(mode="after")
    def _is_there(self) -> Self:
        if self.data > 1 and self.sync == "none":
            raise ValueError(f"sync: none leaves the gradients of {self.data} data-parallel ranks different; set sync")
        if self.schedule is None:
            if self.microbatches is not None:
                raise ValueError("microbatches is for pipelines; set pipe and schedule, or use grad_accumulation")
            return self
        if self.zero > 2:
            asked = "sync: fsdp" if self.sync == "fsdp" else f"zero: {self.zero}"
            raise ValueError(
                f"{asked} cannot be combined with a pipeline, because each micro-batch would gather all parameters; "
                "use zero: 0, 1 or 2"
            )
        if self.data > 1 and self.sync not in UNDER_A_PIPELINE:
            raise ValueError(
                f"sync: {self.sync} cannot be combined with a pipeline, because its gradients are complete only after "
                "the last backward of a stage; use flat, bucketed or sharded, or remove sync"
            )
        return self
