"""Predict the time of a training step in each mode from a network profile and compute times; choose the best. Pure.

    step = compute (with a pipeline's idle time) + exposed communication

*Exposed* communication is the part that the backward does not hide. Without compute times, nothing counts as hidden,
and only communication and memory are predicted. Every time has an interval, combined from the intervals of network
predictions. The slowdown of ranks that share cores, or run a collective during the backward, is not included.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from muster.collectives_bench.cost.exposed import EXPOSED, NO_COMPUTE, Compute, Times
from muster.collectives_bench.cost.load import RankLoad
from muster.collectives_bench.cost.memory import PeakMemory, memory_of
from muster.collectives_bench.cost.modes import Way, cut
from muster.jobs.basics.errors import RefusedError

if TYPE_CHECKING:
    from muster.collectives_bench.cost.profile import Profile

USABLE: Final = 0.9  # usable share of the memory; the rest is reserved for memory that the model does not count


@dataclass(frozen=True)
class PredictedTime:
    """A predicted time with its interval."""

    low_s: float
    seconds: float
    high_s: float

    def __add__(self, seconds: float) -> "PredictedTime":
        """Return the time and its interval, shifted by an exact time."""
        return PredictedTime(self.low_s + seconds, self.seconds + seconds, self.high_s + seconds)

    def overlaps(self, other: "PredictedTime") -> bool:
        """Return True if the intervals overlap, so that it is uncertain which time is shorter."""
        return self.low_s <= other.high_s and other.low_s <= self.high_s


@dataclass(frozen=True)
class ModePrediction:
    """The prediction for one mode. Without compute times, `exposed` is all of its communication."""

    way: Way
    compute_s: float | None
    exposed: PredictedTime | None
    memory: PeakMemory | None
    fits: bool
    notes: tuple[str, ...] = ()

    @property
    def step(self) -> PredictedTime | None:
        """The time of the whole step; None if it is unknown."""
        return None if self.compute_s is None or self.exposed is None else self.exposed + self.compute_s

    @property
    def counts(self) -> bool:
        """True if the mode can be compared and chosen."""
        return self.fits and self.step is not None


@dataclass(frozen=True)
class Ranking:
    """The fastest mode that fits, and the runner-up."""

    best: ModePrediction
    runner_up: ModePrediction | None

    @property
    def margin(self) -> float:
        """The share by which the runner-up is slower than the best mode."""
        assert self.best.step is not None
        if self.runner_up is None:
            return 0.0
        assert self.runner_up.step is not None
        return self.runner_up.step.seconds / self.best.step.seconds - 1

    @property
    def is_clear(self) -> bool:
        """True if the intervals of the best mode and the runner-up do not overlap."""
        if self.runner_up is None:
            return True
        assert self.best.step is not None
        assert self.runner_up.step is not None
        return not self.best.step.overlaps(self.runner_up.step)


def predict(
    ways: Sequence[Way], load: RankLoad, compute: Compute | None, network: "Profile", nodes: int
) -> Iterator[ModePrediction]:
    """Predict each mode independently.

    Raises:
        RefusedError: if the profile has no curves of the backend.
    """
    for way in ways:
        yield _row(way, load, compute, [Times(network, load, nodes, each) for each in ("low_s", "seconds", "high_s")])


def rank(rows: Sequence[ModePrediction]) -> Ranking | None:
    """Choose the fastest mode that fits; None if no mode fits or no step time is known."""
    able = sorted((row for row in rows if row.counts), key=lambda row: row.step.seconds if row.step else 0.0)
    return Ranking(able[0], able[1] if len(able) > 1 else None) if able else None


def with_limit(row: ModePrediction, limit_bytes: float | None) -> ModePrediction:
    """Mark a mode that needs more than nine tenths of the memory limit."""
    if limit_bytes is None or row.memory is None or row.memory.total <= USABLE * limit_bytes:
        return row
    return ModePrediction(row.way, row.compute_s, row.exposed, row.memory, False, (*row.notes, "does not fit"))


def _row(way: Way, load: RankLoad, compute: Compute | None, times: Sequence[Times]) -> ModePrediction:
    memory = memory_of(way, load)
    if memory is None:
        what = "has no width to split" if way.family == "tensor" else "has too few layers"
        return ModePrediction(way, None, None, None, False, (f"{load.model.name} {what}",))
    known, notes = compute or NO_COMPUTE, tuple[str, ...]()
    try:
        # A single rank does not communicate in any mode.
        ends = [0.0] * 3 if load.ranks == 1 else [EXPOSED[way.name](load, known, each) for each in times]
        exposed: PredictedTime | None = PredictedTime(*ends)
    except RefusedError as error:
        exposed, notes = None, (str(error),)
    seconds, idle = _compute_s(way, load, known)
    if idle:
        notes = (*notes, f"idle {100 * idle:.1f} %, {load.microbatches if way.name != 'model' else 1} micro-batches")
    return ModePrediction(way, seconds if compute else None, exposed, memory, True, notes)


def _compute_s(way: Way, load: RankLoad, compute: Compute) -> tuple[float, float]:
    """Return the seconds of computing, including a pipeline's idle time, and the share that is idle."""
    passes = compute.forward_s + compute.backward_s
    if way.family == "single":
        return load.ranks * passes + compute.optimizer_s, 0.0
    if way.family == "pipe":
        assert way.schedule is not None
        stages = cut(load.model, way.schedule, load.ranks)
        assert stages is not None
        idle = way.schedule.idle(load.ranks, way.microbatches(load.microbatches), way.schedule.chunks)
        whole_s = load.ranks * passes
        slowest_s = whole_s * max(stage.flops for stage in stages) / sum(stage.flops for stage in stages)
        # The slowest stage never waits. It hides the work of the other stages, except while the pipeline fills and
        # drains. For GPipe and 1F1B, the step takes (m - 1) / m of the slowest stage's work plus 1 / m of all stages'
        # work. With equal stages, this gives the idle share of the schedule.
        shown = idle / (1 - idle) / (load.ranks - 1) if load.ranks > 1 else 0.0
        seconds = slowest_s + (whole_s - slowest_s) * shown
        update = compute.optimizer_s * max(stage.elements for stage in stages) / load.model.elements
        return seconds + update, 1 - whole_s / (load.ranks * seconds) if seconds else idle
    shards = load.ranks if way.zero or way.family == "tensor" else 1
    return passes + compute.optimizer_s / shards, 0.0
