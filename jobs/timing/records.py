"""What has been timed, as records, torch-free: a line of JSON each while a job runs, one JSON file for all of it after.

    attempt-000/bench.jsonl      timing (the header), then peak, timed and dtypes as they come; the last line is `end`
    result.json                  {"muster_timing": 1, "timings": [{"header": ..., "peaks": [...], "rows": [...], ...}]}

Times are seconds, sizes bytes. Work is counted in floating-point operations, a multiply-add as two, of what the model
needs (`jobs/models/anatomy.py`: causal attention by half); what activation checkpointing computes again does not count.
"""

from typing import Final, Literal

from pydantic import Field

from muster.jobs.spec.strict import Strict, UnixTime
from muster.jobs.spec.train_fields import Precision
from muster.jobs.timing.settings import Pass, TimingSettings

VERSION: Final = 1

State = Literal["ok", "memory", "timeout", "refused", "failed"]


class Machine(Strict):
    """Where it was measured."""

    host: str
    cpu: str
    cores: int
    threads: int  # that torch computes with
    memory_bytes: int
    gpu: str = ""


class Header(Strict):
    """What was asked for, and where it ran; one per run."""

    record: Literal["timing"] = "timing"
    version: int = VERSION
    name: str
    device: Literal["cpu", "cuda"]
    machine: Machine
    torch: str
    settings: TimingSettings
    time: UnixTime


class Peak(Strict):
    """The rate of a product of two square matrices, the best of some."""

    record: Literal["peak"] = "peak"
    precision: Precision
    side: int
    flops_per_s: float


class Summary(Strict):
    """The steps that were timed; of one alone there is no deviation."""

    n: int
    mean_s: float
    std_s: float | None
    min_s: float


class Timed(Strict):
    """One row."""

    record: Literal["timed"] = "timed"
    model: str
    pass_name: Pass
    precision: Precision
    state: State
    reason: str = ""
    parameters: int
    batch: int
    context: int | None  # tokens of a sample; None: images
    build_s: float | None = None  # the model, on its device
    warm_up_s: list[float] = Field(default_factory=list)  # each step before those that count
    steps_s: list[float] = Field(default_factory=list)
    summary: Summary | None = None
    rate: float | None = None  # tokens, or images, a second
    flops: int  # of a step
    flops_per_s: float | None = None
    matmul_share: float | None = None  # of the rate of a matrix product in the same numbers
    peak_bytes: int | None = None  # CUDA: the most that was allocated; CPU: by how much the process grew
    time: UnixTime

    @property
    def first_s(self) -> float | None:
        """The very first step, warm-up or not."""
        return next(iter([*self.warm_up_s, *self.steps_s]), None)

    @property
    def unit(self) -> str:
        """What `rate` counts."""
        return "images" if self.context is None else "tokens"


class LayerTypes(Strict):
    """The types of one layer in a training step; what it has not is `-`."""

    layer: str
    kind: str
    parameters: str
    input: str
    output: str
    gradients: str


class Dtypes(Strict):
    """The types of all layers of a model, as autocast chooses them."""

    record: Literal["dtypes"] = "dtypes"
    model: str
    precision: Precision
    layers: list[LayerTypes]


class Timing(Strict):
    """All of one run."""

    header: Header
    peaks: list[Peak] = Field(default_factory=list)
    rows: list[Timed] = Field(default_factory=list)
    dtypes: list[Dtypes] = Field(default_factory=list)
    is_over: bool = False


class Timings(Strict):
    """All of one or more runs."""

    muster_timing: Literal[1] = VERSION
    timings: list[Timing] = Field(min_length=1)
