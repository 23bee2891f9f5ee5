"""Parse a Chrome trace of PyTorch's profiler: operators by thread, kernels by device, collectives, and steps.

    host lane    step ──────────────────────────────      python, operators, launches: nested by time
                  aten::linear ── aten::addmm ── cudaLaunchKernel ┐ correlation
    device lane                                            kernel ┘
    in flight    gloo:all_reduce ────                     started by one thread, ended by another: not nested

Marks delimit the steps and their phases. `jobs/train/profiling/recorder.py` sets a mark whenever the training's clock
ends a phase: `muster mark start 7`, then `muster mark forward` at the end of the forward, and so on.
Times are microseconds of the trace's own clock.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeAlias

Lane: TypeAlias = tuple[object, object]  # on the host: process and thread; on a device: device and stream
Point: TypeAlias = tuple[Lane, float]

MARK: Final = "muster mark "
START: Final = "start"
STOP: Final = "stop"
HOST: Final = frozenset({"cpu_op", "user_annotation", "python_function", "cuda_runtime", "cuda_driver"})
LAUNCHES: Final = frozenset({"cuda_runtime", "cuda_driver"})
DEVICE: Final = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
IN_FLIGHT: Final = ("gloo:", "nccl:", "mpi:", "ucc:")
MODULE: Final = "module "  # prefix of a module's range, such as `module attention block1.attention`
MODULE_KINDS: Final = (
    *("norm", "attention", "mlp", "convolution", "pooling"),
    *("embedding", "head", "loss", "other"),
)
MEMORY: Final = "[memory]"
LINK: Final = "fwdbwd"
GPU: Final = 1  # the device type of a CUDA device in a trace
PROFILER_STEP: Final = "ProfilerStep#"


class Event(NamedTuple):
    """A timed event. A launch and the kernel it starts have the same `correlation`.

    The event of a module has the module's kind in `module_kind`.
    """

    name: str
    category: str
    start_us: float
    end_us: float
    lane: Lane
    correlation: int | None
    module_kind: str = ""

    @property
    def duration_us(self) -> float:
        """The duration of the event."""
        return self.end_us - self.start_us


class MemoryEvent(NamedTuple):
    """An allocation (positive `bytes`) or a free (negative `bytes`); `total`: bytes allocated after the event."""

    time_us: float
    lane: Lane
    on_device: bool
    address: int
    bytes: int
    total: int


class PhaseSpan(NamedTuple):
    """One phase of a step, from one mark to the next."""

    phase: str
    start_us: float
    end_us: float


@dataclass(frozen=True)
class ProfiledStep:
    """One step that was recorded completely; `number` counts from 1, as in the metrics."""

    number: int
    spans: tuple[PhaseSpan, ...]

    @property
    def start_us(self) -> float:
        """The time at which the step began on the host."""
        return self.spans[0].start_us

    @property
    def end_us(self) -> float:
        """The time at which the step ended on the host."""
        return self.spans[-1].end_us

    def phase_at(self, time_us: float) -> str | None:
        """Return the phase of the step at a given time, or None if the step does not contain that time."""
        for span in self.spans:
            if span.start_us <= time_us < span.end_us:
                return span.phase
        return None


@dataclass
class Trace:
    """The events of one rank, sorted by type."""

    host: dict[Lane, list[Event]] = field(default_factory=dict)
    device: list[Event] = field(default_factory=list)
    in_flight: list[Event] = field(default_factory=list)
    steps: list[ProfiledStep] = field(default_factory=list)
    memory: list[MemoryEvent] = field(default_factory=list)
    links: list[tuple[Point, Point]] = field(default_factory=list)  # starts of a forward operator and of its backward

    @property
    def has_device(self) -> bool:
        """True if the trace has an event on a GPU."""
        return bool(self.device)


def read_trace(events: Iterable[Mapping[str, Any]]) -> Trace:
    """Sort the `traceEvents` of a Chrome trace by type. Events of other types are ignored."""
    trace = Trace()
    marks: list[tuple[float, str]] = []
    ends: dict[object, dict[object, Point]] = {}
    for row in events:
        category = row.get("cat")
        if category == LINK:
            ends.setdefault(row.get("id"), {})[row.get("ph")] = (_lane(row), float(row["ts"]))
        elif row.get("name") == MEMORY and row.get("ph") == "i":
            trace.memory.append(_memory_event(row))
        if row.get("ph") != "X" or (category not in HOST and category not in DEVICE):
            continue
        event = _event(row)
        if event.name.startswith(MARK):
            marks.append((event.start_us, event.name.removeprefix(MARK)))
        elif category in DEVICE:
            trace.device.append(event)
        elif event.name.startswith(IN_FLIGHT):
            trace.in_flight.append(event)
        elif not event.name.startswith(PROFILER_STEP):
            trace.host.setdefault(event.lane, []).append(event)
    trace.steps = steps_between(marks)
    trace.links = [(each["s"], each["f"]) for each in ends.values() if {"s", "f"} <= each.keys()]
    return trace


def steps_between(marks: Iterable[tuple[float, str]]) -> list[ProfiledStep]:
    """Build the steps from marks (time, text). A step without a stop mark is dropped."""
    steps: list[ProfiledStep] = []
    number: int | None = None
    spans: list[PhaseSpan] = []
    last_us = 0.0
    for time_us, text in sorted(marks, key=lambda mark: mark[0]):
        word, _, rest = text.partition(" ")
        if word == START:
            number, spans, last_us = int(rest), [], time_us
        elif word == STOP:
            if number is not None and spans:
                steps.append(ProfiledStep(number, tuple(spans)))
            number = None
        elif number is not None:
            spans.append(PhaseSpan(word, last_us, time_us))
            last_us = time_us
    return steps


def _event(row: Mapping[str, Any]) -> Event:
    arguments = row.get("args") or {}
    start_us = float(row["ts"])
    correlation = arguments.get("correlation")
    event = Event(
        str(row.get("name", "")),
        str(row["cat"]),
        start_us,
        start_us + float(row.get("dur", 0.0)),
        _lane(row),
        correlation if isinstance(correlation, int) else None,
    )
    kind, _, name = event.name.removeprefix(MODULE).partition(" ")
    if not event.name.startswith(MODULE) or kind not in MODULE_KINDS:
        return event
    return event._replace(name=name, category="module", module_kind=kind)


def _lane(row: Mapping[str, Any]) -> Lane:
    return row.get("pid"), row.get("tid")


def _memory_event(row: Mapping[str, Any]) -> MemoryEvent:
    of = row["args"]
    on_device = of["Device Type"] == GPU
    return MemoryEvent(float(row["ts"]), _lane(row), on_device, of["Addr"], of["Bytes"], of["Total Allocated"])
