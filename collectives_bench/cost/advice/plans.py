"""All ways to split a job over its ranks: every mode, and every product of degrees with every number of micro-batches.

ranks = data x pipe x tensor        tensor ranks are adjacent, and pipe ranks furthest apart (`pipe/mesh.py`)
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from muster.collectives_bench.cost.modes import WAYS, Way
from muster.jobs.spec.modes import PIPELINES, TENSOR
from muster.jobs.spec.recorded import IN_PLACE, THROUGH_THE_HOST
from muster.pipe.schedules.tables import SLICES

LEFT_OUT: Final = "model"  # gpipe is never slower
A_STAGE: Final = 16  # most micro-batches for each stage; a pipeline then idles for 6 % of a step
SLICED: Final = "terapipe"
UNDER_A_PIPELINE: Final = ("flat", "bucketed", "zero1", "zero2")  # ways to average gradients between pipelines
WITH_LAYERS: Final = ("allreduce", "flat", "overlap", "bucketed", "ddp", "zero1", "zero2")


@dataclass(frozen=True)
class SplitPlan:
    """One way to split a job. `averaging` is the data-parallel mode of ranks that have the same part of the model."""

    data: int = 1
    pipe: int = 1
    tensor: int = 1
    averaging: str = ""
    schedule: str = ""
    microbatches: int = 1
    bucket_bytes: int | None = None  # None: the job's own

    @property
    def slices(self) -> int:
        """The number of parts of a sequence that pass through the pipeline one after another."""
        return SLICES if self.schedule == SLICED else 1

    @property
    def way(self) -> Way:
        """The mode whose rules and memory apply."""
        return WAYS[self.schedule or (TENSOR if self.tensor > 1 else self.averaging or "single")]

    @property
    def zero(self) -> int:
        """The ZeRO stage of the data-parallel ranks."""
        return WAYS[self.averaging].zero if self.averaging else 0

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.data * self.pipe * self.tensor

    @property
    def is_recordable(self) -> bool:
        """True if the split's steps can be recorded as CUDA graphs, by the rules of `jobs/spec/recorded.py`."""
        if self.schedule in THROUGH_THE_HOST or self.averaging in THROUGH_THE_HOST:
            return False
        return not self.schedule or (self.tensor == 1 and (self.data == 1 or self.averaging in IN_PLACE))

    @property
    def is_mode(self) -> bool:
        """True if a mode's name says it all, except for the number of micro-batches."""
        return (self.data > 1) + (self.pipe > 1) + (self.tensor > 1) <= 1

    @property
    def text(self) -> str:
        """A short name, such as `bucketed` or `data 2 by zero1 x pipe 2 by 1f1b, 8 micro-batches`."""
        count = f", {self.microbatches} micro-batches" if self.schedule else ""
        count += f" of {self.slices} slices" if self.slices > 1 else ""
        if self.is_mode:
            return f"{self.way.name}{count}"
        parts = [f"data {self.data} by {self.averaging}"] if self.data > 1 else []
        parts += [f"pipe {self.pipe} by {self.schedule}"] if self.pipe > 1 else []
        parts += [f"tensor {self.tensor}"] if self.tensor > 1 else []
        return " x ".join(parts) + count

    def changes(self) -> dict[str, Any]:
        """Return the keys of `train:` that set this split; None removes a key."""
        found: dict[str, Any] = {"parallel": None, "microbatches": self.microbatches if self.schedule else None}
        if self.bucket_bytes is not None:
            found["bucket_size_mb"] = self.bucket_bytes / 2**20
        if self.is_mode:
            return {**found, "mode": self.way.name}
        parallel: dict[str, Any] = {"data": self.data, "pipe": self.pipe, "tensor": self.tensor}
        parallel = {axis: degree for axis, degree in parallel.items() if degree > 1}
        if self.schedule:
            parallel |= {"schedule": self.schedule, "microbatches": self.microbatches}
        if self.data > 1:
            parallel |= {"zero": self.zero} if self.zero else {"sync": self.averaging}
        return {**found, "mode": None, "microbatches": None, "parallel": parallel}


def changed(section: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a `train:` section with a plan's changes; None removes a key."""
    merged = {**section, **changes}
    return {key: value for key, value in merged.items() if value is not None or key not in changes}


@dataclass(frozen=True)
class SplitLimits:
    """What a model and a batch allow."""

    ranks: int
    batch: int
    layers: int  # a pipeline has at most so many stages
    tensor: Sequence[int] = ()  # degrees of split layers
    context: int = 0  # tokens of a sequence that can be cut into slices; 0: none can


def every_plan(limits: SplitLimits) -> Iterator[SplitPlan]:
    """Yield all plans. Numbers of micro-batches are powers of two, up to 16 for each stage."""
    if limits.ranks == 1:
        yield SplitPlan()
        return
    if limits.batch >= limits.ranks:
        for name, way in WAYS.items():
            if way.family == "data" and name != LEFT_OUT:
                yield SplitPlan(data=limits.ranks, averaging=name)
    for pipe in _divisors(limits.ranks):
        for tensor in _divisors(limits.ranks // pipe):
            if (tensor > 1 and tensor not in limits.tensor) or pipe * tensor == 1:
                continue
            data = limits.ranks // pipe // tensor
            if data <= limits.batch and pipe <= limits.layers:
                yield from _products(limits, data, pipe, tensor)


def _products(limits: SplitLimits, data: int, pipe: int, tensor: int) -> Iterator[SplitPlan]:
    if pipe == 1:
        yield from (SplitPlan(data, 1, tensor, name) for name in (WITH_LAYERS if data > 1 else ("",)))
        return
    for name in PIPELINES:
        schedule = WAYS[name].schedule
        if name == LEFT_OUT or schedule is None or pipe * schedule.chunks > limits.layers:
            continue
        if name == SLICED and (tensor > 1 or data > 1 or limits.context < SLICES):
            continue
        slices = SLICES if name == SLICED else 1
        for count in _counts(min(limits.batch // data, A_STAGE * pipe // slices)):
            for averaging in UNDER_A_PIPELINE if data > 1 else ("",):
                yield SplitPlan(data, pipe, tensor, averaging, name, count)


def _counts(most: int) -> list[int]:
    return [2**power for power in range(most.bit_length())]


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]
