"""The `bench:` section of a job file. This module does not import torch."""

from typing import Annotated, Any, Final, Literal

from pydantic import Field, field_validator, model_validator
from typing_extensions import Self

from muster.collectives_bench.catalog import OPERATIONS
from muster.collectives_bench.sizes import parse_sizes
from muster.jobs.basics.errors import RefusedError
from muster.jobs.basics.words import unknown
from muster.jobs.spec.strict import Positive, Strict, as_list, one_or_many

HELLO: Final = "hello"
ALL: Final = "all"  # "all": all operations of the library; "ours": all of Muster's own operations
OURS: Final = "ours"

Seconds = Annotated[float, Field(gt=0.0)]


def _operations(schema: dict[str, Any]) -> None:
    schema["items"]["enum"] = [HELLO, ALL, OURS, *OPERATIONS]
    one_or_many(schema)


def _sizes(schema: dict[str, Any]) -> None:
    schema["items"] = {"type": ["integer", "string"]}
    one_or_many(schema)


class BenchSettings(Strict):
    """The settings of a benchmark. `operation: hello` measures nothing: every rank prints where it runs."""

    operation: list[str] = Field(
        [ALL],
        min_length=1,
        description="operations to measure; `all` or `ours` for a group",
        examples=["all_reduce"],
        json_schema_extra=_operations,
    )
    sizes: list[int] = Field(
        default_factory=lambda: parse_sizes("default"),
        description="sizes in bytes: one, several, a range `512K:1G` (`:2` is the factor), or `course`",
        examples=["512K:1G"],
        json_schema_extra=_sizes,
    )
    dtypes: list[Literal["fp32", "bf16", "fp16", "int32"]] = Field(
        ["fp32"], min_length=1, description="types of the elements", json_schema_extra=one_or_many
    )
    places: Literal["default", "in", "out", "both"] = Field(
        "default", description="whether results overwrite their inputs (in), or not (out)"
    )
    calls: list[Literal["sync", "async"]] = Field(
        ["sync"], min_length=1, description="blocking calls, or async_op", json_schema_extra=one_or_many
    )
    backend: Literal["auto", "gloo", "nccl"] = Field("auto", description="auto: nccl on GPUs, gloo on CPUs")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: GPUs if every rank has one")
    launches: Positive = Field(5, description="launches with fresh processes; the unit of the statistics")
    block_s: Seconds = Field(0.25, description="seconds for the samples of one size in one launch")
    least_samples: Positive = Field(5, description="fewest calls of a size in a launch")
    most_samples: Positive = Field(1000, description="most calls of a size in a launch")
    precision: Annotated[float, Field(gt=0.0, lt=1.0)] = Field(
        0.03, description="stop sampling early when the confidence interval is narrower than this share of the time"
    )
    timeout_s: Seconds = Field(30.0, description="seconds after which a call is abandoned")
    check: bool = Field(True, description="compare every element of every result")
    wire: bool = Field(False, description="count the bytes that the interfaces send")
    pairs: bool = Field(False, description="measure every pair of nodes, to find slow nodes and links")
    pair_bytes: Positive = Field(4 * 2**20, description="with `pairs`: bytes of a message")
    memory_share: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        0.8, description="share of a host's free memory that buffers may fill"
    )
    seed: int = Field(0, description="seed of the random order of the measurements")

    @field_validator("dtypes", mode="before")
    @classmethod
    def _short_names(cls, value: Any) -> Any:
        return ["int32" if each == "int" else each for each in value] if isinstance(value, list) else value

    @field_validator("operation", "sizes", "dtypes", "calls", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return as_list(value)

    @field_validator("sizes", mode="before")
    @classmethod
    def _sizes(cls, value: Any) -> list[int]:
        words = as_list(value)  # pydantic runs this validator before `_one_or_many`, which is defined above it
        return sorted({size for word in words for size in parse_sizes(word)})

    @field_validator("operation")
    @classmethod
    def _are_known(cls, names: list[str]) -> list[str]:
        for name in names:
            if name not in OPERATIONS and name not in (HELLO, ALL, OURS):
                raise ValueError(unknown("operation", name, (HELLO, ALL, OURS, *OPERATIONS)))
        if HELLO in names and len(names) > 1:
            raise ValueError("hello measures nothing; do not combine it with other operations")
        return names

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.backend == "nccl" and self.device == "cpu":
            raise ValueError("nccl supports only GPUs; set device: cuda, or backend: gloo")
        if self.most_samples < self.least_samples:
            raise ValueError(f"most_samples: {self.most_samples} is less than least_samples, {self.least_samples}")
        return self

    @property
    def is_hello(self) -> bool:
        """True if the job only runs `hello`, which tests a new cluster."""
        return self.operation == [HELLO]

    def operations(self) -> list[str]:
        """Return the operations in the order of the catalog, with `all` and `ours` expanded."""
        wanted = set(self.operation)
        if ALL in wanted:
            wanted |= {name for name, each in OPERATIONS.items() if not each.ours}
        if OURS in wanted:
            wanted |= {name for name, each in OPERATIONS.items() if each.ours}
        return [name for name in OPERATIONS if name in wanted]

    def check_world(self, world_size: int) -> None:
        """Refuse settings that do not fit the world size.

        Raises:
            RefusedError: if an operation or `pairs` needs more ranks.
        """
        if self.pairs:
            if world_size < 2:
                raise RefusedError(f"bench.pairs: needs 2 nodes or more, got {world_size}; set nodes: 2")
            return
        for name in self.operations():
            if ALL not in self.operation and world_size < (least := OPERATIONS[name].least_ranks):
                raise RefusedError(
                    f"bench.operation: {name} needs {least} ranks, but this job has {world_size}; set nodes"
                )
