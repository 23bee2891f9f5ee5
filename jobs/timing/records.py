"""Timings as records, torch-free: one JSON line each while a job runs, then one JSON file with all of them.

    attempt-000/bench.jsonl      first timing (the header), then peak, timed and dtypes as measured, last `end`;
                                 each launch of a row writes the row again, with all its launches so far
    result.json                  {"muster_timing": 1, "timings": [{"header": ..., "peaks": [...], "rows": [...], ...}]}

Times are seconds, sizes bytes. Work is counted in floating-point operations (a multiply-add is two) that the model
needs (`jobs/models/anatomy.py`; causal attention counts half). Recomputation by activation checkpointing does not
count.
"""

from itertools import islice
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, model_validator
from typing_extensions import Self

from muster.jobs.basics.errors import JobFileError
from muster.jobs.basics.words import counted
from muster.jobs.spec.gone import gone
from muster.jobs.spec.strict import NonNegative, Strict, UnixTime
from muster.jobs.spec.train_fields import Precision
from muster.jobs.timing.settings import Case, Pass, TimingSettings

VERSION: Final = 1
OF_NORMS: Final = ("widths", "width", "moved_bytes", "bytes_per_s", "copy_share")

Share = Annotated[float, Field(ge=0.0, le=1.0)]
Seconds = Annotated[float, Field(ge=0.0, lt=1e9)]
State = Literal["ok", "memory", "timeout", "refused", "failed"]


def without_norms(values: Any) -> Any:
    """Remove the keys of norms, which version 0.1.0 wrote without a value for models.

    Raises:
        JobFileError: if the values are the settings of a timing of norms.
    """
    if not isinstance(values, dict):
        return values
    if values.get("widths"):
        raise JobFileError(f"this is a timing of norms; {gone('widths')}")
    return {key: value for key, value in values.items() if value or key not in OF_NORMS}


class Machine(Strict):
    """The machine of the measurements."""

    host: str
    cpu: str
    cores: int
    threads: int  # number of torch's threads
    memory_bytes: int
    gpu: str = ""


class Header(Strict):
    """The settings and the machine of a run."""

    record: Literal["timing"] = "timing"
    version: int = VERSION
    name: str
    device: Literal["cpu", "cuda"]
    machine: Machine
    torch: str
    settings: Annotated[TimingSettings, BeforeValidator(without_norms)]
    time: UnixTime


class Peak(Strict):
    """The best rate over several multiplications of two square matrices."""

    record: Literal["peak"] = "peak"
    precision: Precision
    side: int
    flops_per_s: float


class Launch(Strict):
    """One fresh process of a row: its numbers of warm-up and timed steps, and the time at which it ended."""

    warm_up: NonNegative
    steps: NonNegative
    time: UnixTime
    foreign: Share | None = None  # share of the CPUs used by other programs meanwhile


class TimingSummary(Strict):
    """Statistics of all timed steps; a single step has no deviation."""

    n: int
    mean_s: float
    std_s: float | None
    min_s: float


class Timed(Strict):
    """One row with its launches so far. Each launch writes the row again."""

    record: Literal["timed"] = "timed"
    model: str
    pass_name: Pass
    precision: Precision
    state: State
    reason: str = ""
    parameters: int
    batch: int
    context: int | None  # tokens per sample; None if samples are not sequences of tokens
    is_own: bool = False  # True for the model of a train: section
    build_s: float | None = None  # time to build the model on its device, in the last launch
    warm_up_s: list[Seconds] = Field(default_factory=list)  # time of each warm-up step, launch by launch
    steps_s: list[Seconds] = Field(default_factory=list)
    launches: list[Launch] = Field(default_factory=list)  # empty if an older Muster wrote the row, with a single launch
    summary: TimingSummary | None = None
    rate: float | None = None  # tokens, images or samples per second
    flops: int  # number of floating-point operations of a step; 0 if unknown
    flops_per_s: float | None = None
    matmul_share: float | None = None  # relative to the rate of a matrix product in the same precision
    peak_bytes: int | None = None  # CUDA: peak of allocated bytes; CPU: peak growth of the process
    time: UnixTime

    @model_validator(mode="before")
    @classmethod
    def _without_norms(cls, values: Any) -> Any:
        return without_norms(values)

    @model_validator(mode="after")
    def _launches_have_all_steps(self) -> Self:
        if self.launches and sum(each.steps for each in self.launches) != len(self.steps_s):
            raise ValueError(f"the steps of the launches do not add up to {len(self.steps_s)}")
        return self

    @property
    def case(self) -> Case:
        """The case that the row measures."""
        return Case(self.model, self.pass_name, self.precision, self.is_own)

    @property
    def steps_of_launches(self) -> list[tuple[list[float], Launch]]:
        """The launches that have timed steps, each with the times of its steps."""
        steps = iter(self.steps_s)
        launches = self.launches or [Launch(warm_up=len(self.warm_up_s), steps=len(self.steps_s), time=self.time)]
        return [(list(islice(steps, each.steps)), each) for each in launches if each.steps]

    @property
    def first_s(self) -> float | None:
        """The time of the very first step, which may be a warm-up step."""
        return next(iter([*self.warm_up_s, *self.steps_s]), None)

    @property
    def unit(self) -> str:
        """The unit that `rate` counts per second."""
        return "tokens" if self.context is not None else "samples" if self.is_own else "images"


class LayerTypes(Strict):
    """The dtypes of one layer in a training step; `-` where the layer has no such tensor."""

    layer: str
    kind: str
    parameters: str
    input: str
    output: str
    gradients: str


class Dtypes(Strict):
    """The dtypes of all layers of a model, as autocast chooses them."""

    record: Literal["dtypes"] = "dtypes"
    model: str
    precision: Precision
    layers: list[LayerTypes]


class TimingRecords(Strict):
    """All records of one run."""

    header: Header
    peaks: list[Peak] = Field(default_factory=list)
    rows: list[Timed] = Field(default_factory=list)
    dtypes: list[Dtypes] = Field(default_factory=list)
    is_over: bool = False

    @property
    def left(self) -> list[tuple[int, Case]]:
        """The rows with launches left, next row first, each with the number of its launches so far."""
        most = self.header.settings.launches
        done = {row.case: len(row.launches) if row.state == "ok" else most for row in self.rows}
        counts = [(done.get(case, 0), case) for case in self.header.settings.cases()]
        return sorted((each for each in counts if each[0] < most), key=lambda each: each[0])


class Timings(Strict):
    """The records of one or more runs."""

    muster_timing: Literal[1] = VERSION
    timings: list[TimingRecords] = Field(min_length=1)

    @property
    def missing(self) -> str:
        """A line about unfinished rows; empty if all rows are finished."""
        unfinished = [each for each in self.timings if not each.is_over]
        left = sum(len(each.left) for each in unfinished)
        return f"not finished: {counted(left, 'row')} with launches left" if unfinished else ""
