"""Measure the time of each phase of a step. Marks separate the phases; they are converted to seconds at log points.

    start ─ data ─ forward ─ backward ─ communication ─ optimizer ─ stop        repeated by micro-batches

On a CPU a mark is a clock reading. On CUDA it is an event in the stream, so that it needs no synchronization.
`communication` is the time that computation waits for communication. A step that is replayed from a CUDA graph cannot
be marked inside, so one phase, `replay`, replaces the four after `data`. In a pipeline on CUDA, all computation and
waits of the stages count as `backward`; `muster timeline` shows them separately.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from operator import itemgetter
from time import perf_counter
from typing import Any, Final, Literal

import torch

Phase = Literal["data", "forward", "backward", "communication", "optimizer", "replay"]
PHASES: Final[tuple[Phase, ...]] = ("data", "forward", "backward", "communication", "optimizer")  # every row has these


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one step, in total and by phase."""

    step_s: float
    phases: dict[Phase, float]

    def row(self) -> dict[str, float]:
        """Return the times as columns of a metrics row."""
        return {"step_s": self.step_s, **{f"{phase}_s": seconds for phase, seconds in self.phases.items()}}


class StepMarks:
    """Marks of the steps since the last `take`."""

    def __init__(self, mark: Callable[[], Any], seconds: Callable[[Any, Any], float]) -> None:
        self._mark = mark
        self._seconds = seconds
        self._steps: list[list[tuple[Phase, Any]]] = []
        self._laps: list[tuple[Phase, Any]] = []
        self._waits: list[Any] = []  # marks of waits without a phase: begin, end, begin, end, ...
        self._muted = False
        self.phase: Phase | None = "forward"  # the phase that waits interrupt; None: `laps_at` finds it
        self.listener: Callable[[str], None] | None = None  # called at every mark while the profiler records

    def start(self) -> None:
        """Begin a step."""
        self._laps, self._waits = [("data", self._mark())], []
        if self.listener is not None:
            self.listener("start")

    def lap(self, phase: Phase) -> None:
        """Set a mark at the end of a phase, which began at the previous mark."""
        if self._muted:
            return
        self._laps.append((phase, self._mark()))
        if self.listener is not None:
            self.listener(phase)

    def wait(self, begins: bool) -> None:
        """Mark the beginning or the end of a wait for communication within a phase.

        forward ──┤wait├── forward ── | ── backward ──┤wait├── backward          between the bars: communication
        """
        if self.phase is not None:
            self.lap(self.phase if begins else "communication")
        elif not self._muted:
            self._waits.append(self._mark())

    def laps_at(self, ends: Sequence[tuple[Phase, float]]) -> None:
        """Set marks at times in the past, each with the phase that ended then. Works only on CPUs.

        The times ascend and are from `time.monotonic()`, which on Linux reads the same clock as `time.perf_counter()`.
        A wait that was marked without a phase interrupts the phase that ends next.
        """
        if self._muted:
            return
        laps, times = [*ends], [at for _, at in ends]
        for begin, end in zip(self._waits[::2], self._waits[1::2], strict=True):
            around = bisect_left(times, end)
            laps += [(ends[around][0] if around < len(ends) else "communication", begin), ("communication", end)]
        self._laps += sorted(laps, key=itemgetter(1))
        self._waits.clear()

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Ignore marks within this context, whose work is not part of a timed step."""
        self._muted = True
        try:
            yield
        finally:
            self._muted = False

    def stop(self) -> None:
        """End the step at its last mark."""
        self._steps.append(self._laps)
        if self.listener is not None:
            self.listener("stop")

    @property
    def newest(self) -> Sequence[tuple[Phase, Any]]:
        """The marks of the newest step, each with the phase that ends there; the first one begins the step."""
        return self._laps

    def mark(self) -> Any:
        """Return a mark that belongs to no phase."""
        return self._mark()

    def moments(self, marks: Iterable[Any]) -> list[float]:
        """Return the times of marks, in seconds of this process's `time.monotonic()`. On CUDA this waits for them."""
        anchor = self._mark()
        self._seconds(anchor, anchor)  # waits until the device reaches the anchor
        now = perf_counter()
        return [now - self._seconds(each, anchor) for each in marks]

    def take(self) -> list[StepTimes]:
        """Return the times of all steps since the last call, oldest first. On CUDA this waits for the last step."""
        steps, self._steps = self._steps, []
        return [self._resolve(laps) for laps in steps]

    def _resolve(self, laps: list[tuple[Phase, Any]]) -> StepTimes:
        phases: dict[Phase, float] = dict.fromkeys(PHASES, 0.0)
        for (_, before), (phase, after) in pairwise(laps):
            phases[phase] = phases.get(phase, 0.0) + self._seconds(before, after)
        return StepTimes(self._seconds(laps[0][1], laps[-1][1]), phases)


def clock_for(device: torch.device) -> StepMarks:
    """Return the clock of a device."""
    if device.type == "cuda":
        return StepMarks(partial(_event, device.index), _event_seconds)
    return StepMarks(perf_counter, _difference)


def _difference(before: float, after: float) -> float:
    return after - before


def _event(index: int | None) -> torch.cuda.Event:
    event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(index))  # finding the current device would take longer than the rest
    return event


def _event_seconds(before: torch.cuda.Event, after: torch.cuda.Event) -> float:
    before.synchronize()
    after.synchronize()
    milliseconds: float = before.elapsed_time(after)
    return milliseconds / 1e3
