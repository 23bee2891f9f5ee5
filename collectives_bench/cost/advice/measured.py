"""Times of a job's model on one machine, as `jobs/train/timing/layers.py` measured them. Pure.

A pass is one forward or one backward of some samples. `active` is the number of ranks that compute at the same time on
the machine: ranks that share cores, memory and caches slow each other down. Between measured sizes and numbers of
ranks, times are interpolated.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from functools import cached_property
from statistics import median
from typing import Final, Literal

from pydantic import Field

from muster.collectives_bench.cost.advice.plans import SLICED
from muster.collectives_bench.cost.buckets import Lanes
from muster.jobs.measuring.recorded import Format
from muster.jobs.spec.modes import PIPELINES
from muster.jobs.spec.strict import Strict
from muster.pipe.schedules.tables import SLICES

VERSION: Final = 1
STOLEN: Final = 0.75  # largest share of the computing cores that collectives may take
SIZES: Final = (1 << 10, 1 << 20)  # bytes of the measured all-reduces
HALVES: Final = 2
WHOLE: Final = "flat"  # a measured mode in which every rank has all layers
SHARDED: Final = "zero1"  # another one, in which each rank updates a shard of the parameters
LIKE: Final = {"zbv": "zb1p", "interleaved": "1f1b", SLICED: "gpipe"}  # if no steps of the schedule were measured
SPLITS_BACKWARD: Final = ("zb1p", "zbv")
COUNTED: Final = "gpipe"  # the schedule whose steps are measured with few and with many micro-batches
POINTS: Final = 2  # of a line
RING: Final = 2  # an all-reduce of n ranks has 2 (n - 1) messages in sequence


class PassTimes(Strict):
    """Seconds of a forward and a backward of `samples` samples, while `active` ranks compute."""

    samples: int = Field(ge=1)
    active: int = Field(ge=1)
    forward_s: float = Field(ge=0)
    backward_s: float = Field(ge=0)


class UpdateTime(Strict):
    """Seconds of an optimizer step of the whole model."""

    active: int = Field(ge=1)
    seconds: float = Field(ge=0)


class LayerTime(Strict):
    """Seconds of one layer's forward and backward."""

    name: str
    forward_s: float = Field(ge=0)
    backward_s: float = Field(ge=0)


class RealSteps(Strict, extra="ignore"):  # files of Muster 0.1.0 also have the number of slices
    """Steps of the engine on all measured ranks, with `samples` samples in each of `microbatches` micro-batches.

    In a pipeline, every rank has a stage, and all micro-batches pass through it; else each rank has its share of them.
    """

    mode: str
    microbatches: int = Field(ge=1)
    samples: int = Field(ge=1)
    seconds: float = Field(ge=0)
    host_s: float = Field(ge=0)  # on GPUs: until the host has enqueued a step
    cpu_s: float = Field(ge=0)  # of a rank's threads

    @property
    def slices(self) -> int:
        """The number of slices of each sequence."""
        return SLICES if self.mode == SLICED else 1

    @property
    def is_pipeline(self) -> bool:
        """True if every rank has a stage."""
        return self.mode in PIPELINES


class LayerTimes(Strict, extra="ignore"):  # files of Muster 0.1.0 also have times of slices
    """What was measured of a model on a machine."""

    muster_layers: Literal[1] = VERSION
    model: str = ""
    device: str = "cpu"
    gpu: str = ""
    cores: int = Field(ge=1)
    ranks: int = Field(ge=1)
    passes: list[PassTimes] = Field(min_length=1)
    updates: list[UpdateTime] = Field(min_length=1)
    replays: list[PassTimes] = Field(default_factory=list)  # passes recorded as CUDA graphs
    halves: list[float] = Field(default_factory=list)  # seconds of a backward, and of its halves: inputs, weights
    layers: list[LayerTime] = Field(default_factory=list)
    steps: list[RealSteps] = Field(default_factory=list)
    accumulate_s: float = 0.0  # of a recorded backward that adds to gradients
    data_s: float = 0.0
    host: list[float] = Field(default_factory=list)  # seconds of the host's part of a forward, backward and update
    variants: dict[str, list[float] | None] = Field(default_factory=dict)
    messages: dict[str, float] = Field(default_factory=dict)
    spread: float = 0.0  # relative error of the measured times

    def pass_s(self, samples: float, active: float = 1.0, *, recorded: bool = False) -> tuple[float, float]:
        """Return the seconds of a forward and a backward. `recorded`: of replayed ones, if those were measured."""
        curves = self._replayed if recorded and self.replays else self._curves
        at = {size: _at(points, samples) for size, points in curves.items()}
        active = active if self.device == "cpu" else 1.0  # GPUs do not slow each other down
        return tuple(_between({size: pair[i] for size, pair in at.items()}, active) for i in (0, 1))  # type: ignore[return-value]

    @cached_property
    def _curves(self) -> dict[int, list[tuple[int, float, float]]]:
        return _curves(self.passes)

    @cached_property
    def _replayed(self) -> dict[int, list[tuple[int, float, float]]]:
        return _curves(self.replays)

    @property
    def backward_halves(self) -> tuple[float, float]:
        """The two halves of a split backward, for inputs and for weights, as shares of a whole backward."""
        if len(self.halves) != 1 + HALVES or not self.halves[0]:
            return 0.5, 0.5
        return self.halves[1] / self.halves[0], self.halves[2] / self.halves[0]

    def engine_s(self, mode: str, samples: float) -> float:
        """Return the CPU seconds of an action besides its layers: of the engine and its messages on the loopback.

        Without a pipeline, the whole step is one action. `samples` is a fraction of samples in a slice of them.
        """
        own = any(each.mode == mode for each in self.steps)
        like = [each for each in self.steps if each.mode == (mode if own else LIKE.get(mode))]
        if self.device != "cpu" or not like:
            return 0.0
        extra = sorted({each.samples / each.slices: self._of_action_s(each) for each in like}.items())
        largest, most_s = extra[-1]
        if samples > largest:  # more work costs more, at most in proportion
            return min(max(_line(extra, samples), most_s), most_s * samples / largest)
        return max(_line(extra, samples), 0.0)

    @property
    def each_step_s(self) -> float:
        """The CPU seconds of a pipeline's step besides its actions, from steps that differ in their micro-batches."""
        like = (each for each in self.steps if each.mode == COUNTED and each.samples == 1)
        of = sorted((each.microbatches, self._besides_layers_s(each)) for each in like)
        if self.device != "cpu" or len(of) < POINTS:
            return 0.0
        (few, few_s), (many, many_s) = of[0], of[-1]
        return min(max(few_s - few * (many_s - few_s) / (many - few), 0.0), few_s)

    def _of_action_s(self, step: RealSteps) -> float:
        besides_s = self._besides_layers_s(step)
        if not step.is_pipeline:
            return besides_s
        return max(besides_s - self.each_step_s, 0.0) / (2 * step.slices * step.microbatches)

    def _besides_layers_s(self, step: RealSteps) -> float:
        busy = min(self.cores / self.ranks, 1.0)  # a rank's share of a core, while all ranks compute
        passes_s = step.slices * sum(self.pass_s(step.samples / step.slices, self.ranks)) * busy
        passes_s, update_s = passes_s * step.microbatches / self.ranks, self.update_s(self.ranks) * busy
        return max(step.cpu_s - passes_s - update_s / (1 if step.mode == WHOLE else self.ranks), 0.0)

    def host_s(self, actions: int, pipe: int) -> float:
        """Return the seconds in which a GPU's host enqueues a step of a pipeline with so many stages and actions.

        The optimizer's part is proportional to the parameters of a rank.
        """
        pipelines = [each for each in self.steps if each.is_pipeline]
        of = [(actions_of(each.mode) * each.microbatches, each.host_s) for each in pipelines]
        if len(of) < POINTS:
            return actions * (self.messages.get("launch_s", 0.0) + self.messages.get("call_s", 0.0))
        (few, few_s), (many, many_s) = min(of), max(of)
        each_s = max(many_s - few_s, 0.0) / (many - few)
        update_s = self.host[-1] if self.host else 0.0
        return few_s + (actions - few) * each_s + update_s * (1 / pipe - 1 / self.ranks)

    def stretch(self, active: float) -> float:
        """Return the factor by which `active` computing ranks slow each other down."""
        sizes = {each.samples for each in self.passes}
        return max(median(sum(self.pass_s(size, active)) / sum(self.pass_s(size, 1)) for size in sizes), 1.0)

    def update_s(self, active: float) -> float:
        """Return the seconds of an optimizer step of the whole model."""
        active = active if self.device == "cpu" else 1.0
        return _between({each.active: each.seconds for each in self.updates}, active)

    def shares(self, names: Iterable[str]) -> tuple[float, float] | None:
        """Return the share of some layers in a forward and in a backward; None if layers were not measured."""
        if not self.layers:
            return None
        wanted = set(names)
        own = [each for each in self.layers if each.name in wanted]
        forward, backward = (sum(getattr(each, key) for each in own) for key in ("forward_s", "backward_s"))
        return forward / sum(each.forward_s for each in self.layers), backward / sum(
            each.backward_s for each in self.layers
        )

    def factor(self, option: str) -> float | None:
        """Return the time of passes with an option, relative to passes without; None if it was not measured."""
        took = self.variants.get(option)
        first = self.passes[0]
        plain = sum(self.pass_s(first.samples, self.ranks))
        return sum(took) / plain if took and plain else None

    def lanes(self, backend: str, active: int, bytes_per_s: float, cpu_s_per_byte: float = 0.0) -> Lanes:
        """Return how collectives at this rate and a computation on `active` ranks of a machine slow each other down.

        `cpu_s_per_byte` is that of a message on the network; on the loopback, a byte may cost less. Collectives use
        idle cores first. Beyond that they take time from the computation; and while all cores are busy, each collective
        waits for its threads to be scheduled.
        """
        usual, told = Lanes.of(backend), self.messages
        if self.device != "cpu":
            return Lanes(usual.concurrent, usual.host_s, max(told.get("slowed", 1.0), 1.0))
        computing = min(active, self.cores)
        each = max(told.get("cpu_s_per_byte", 0.0), cpu_s_per_byte * self._messages_of_reduce)
        demand = active * each * bytes_per_s
        stolen = min(max(demand - (self.cores - computing), 0.0), STOLEN * computing)
        busy_s = RING * (self.ranks - 1) * self.late_s() if active >= self.cores else 0.0
        return Lanes(usual.concurrent, usual.host_s, computing / (computing - stolen), busy_s)

    @property
    def _messages_of_reduce(self) -> float:
        """The bytes that a rank sends in an all-reduce, relative to its buffer."""
        return RING * (self.ranks - 1) / self.ranks

    def message_s(self, nbytes: float, cpu_s_per_byte: float) -> float:
        """Return the CPU seconds that sender and receiver need for a message, beyond those on the loopback."""
        if self.device != "cpu" or self.ranks == 1:
            return 0.0
        loopback = self.messages.get("cpu_s_per_byte", 0.0) / self._messages_of_reduce
        return nbytes * max(cpu_s_per_byte - loopback, 0.0)

    def late_s(self) -> float:
        """Return how long a message waits for a thread of its receiver while all cores are busy."""
        late = [self.messages.get(f"busy_{size}_s", 0.0) - self.messages.get(f"idle_{size}_s", 0.0) for size in SIZES]
        return max(sum(late) / len(late), 0.0) / (RING * max(self.ranks - 1, 1))


def actions_of(schedule: str) -> int:
    """Return the number of actions of a micro-batch in a stage: a forward, and a backward in one part or two."""
    return 3 if schedule in SPLITS_BACKWARD else 2


def _curves(passes: Iterable[PassTimes]) -> dict[int, list[tuple[int, float, float]]]:
    """Return samples, forward and backward in order of size, by the number of ranks that compute."""
    found: dict[int, list[tuple[int, float, float]]] = {}
    for each in sorted(passes, key=lambda each: each.samples):
        found.setdefault(each.active, []).append((each.samples, each.forward_s, each.backward_s))
    return found


def _at(points: Sequence[tuple[int, float, float]], samples: float) -> tuple[float, float]:
    return _line([(x, f) for x, f, _ in points], samples), _line([(x, b) for x, _, b in points], samples)


def _line(points: Sequence[tuple[float, float]], x: float) -> float:
    """Interpolate; beyond the ends, extend the nearest piece, but never below proportionality from the first point."""
    if len(points) == 1:
        return points[0][1] * x / points[0][0]
    place = min(max(bisect_left([each[0] for each in points], x), 1), len(points) - 1)
    (x0, y0), (x1, y1) = points[place - 1], points[place]
    value = y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return max(value, points[0][1] * min(x / points[0][0], 1.0))


def _between(values: dict[int, float], at: float) -> float:
    """Interpolate between numbers of ranks; beyond the largest, times grow in proportion."""
    known = sorted(values)
    if at >= known[-1]:
        return values[known[-1]] * at / known[-1] if known[-1] > 1 else values[known[-1]]
    if at <= known[0]:
        return values[known[0]]
    place = bisect_left(known, at)
    low, high = known[place - 1], known[place]
    return values[low] + (values[high] - values[low]) * (at - low) / (high - low)


FORMAT: Final[Format[LayerTimes, LayerTimes]] = Format(
    "muster advise", "muster_layers", VERSION, "", {}, LayerTimes, lambda records: None
)
