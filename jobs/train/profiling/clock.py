"""Where a step's time goes: marks between phases, turned into seconds only when somebody asks.

    start ─ data ─ forward ─ backward ─ communication ─ optimizer ─ stop        repeated by micro-batches

On a CPU a mark is a clock reading. On CUDA it is an event in the stream, so that a mark costs no synchronization;
the seconds are read at log points. `communication` is the exposed wait: what the backward did not hide. A step that is
replayed from a CUDA graph has one phase, `replay`, in place of the four after `data`: there are no marks inside. Of a
pipeline on CUDA all work and waits of its stages are `backward`; `muster timeline` has them apart.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter
from typing import Any, Final, Literal

import torch

Phase = Literal["data", "forward", "backward", "communication", "optimizer", "replay"]
PHASES: Final[tuple[Phase, ...]] = ("data", "forward", "backward", "communication", "optimizer")  # in every row


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one step, in all and by phase."""

    step_s: float
    phases: dict[Phase, float]

    def row(self) -> dict[str, float]:
        """Spell the times as columns of a metrics row."""
        return {"step_s": self.step_s, **{f"{phase}_s": seconds for phase, seconds in self.phases.items()}}


class Clock:
    """Marks of the steps since the last `take`."""

    def __init__(self, mark: Callable[[], Any], seconds: Callable[[Any, Any], float]) -> None:
        self._mark = mark
        self._seconds = seconds
        self._steps: list[list[tuple[Phase, Any]]] = []
        self._laps: list[tuple[Phase, Any]] = []
        self._muted = False
        self.listener: Callable[[str], None] | None = None  # is told of every mark, while steps are recorded

    def start(self) -> None:
        """Begin a step."""
        self._laps = [("data", self._mark())]
        if self.listener is not None:
            self.listener("start")

    def lap(self, phase: Phase) -> None:
        """Say that the time since the mark before belongs to `phase`."""
        if self._muted:
            return
        self._laps.append((phase, self._mark()))
        if self.listener is not None:
            self.listener(phase)

    def laps_at(self, ends: Iterable[tuple[Phase, float]]) -> None:
        """Say what the time since the mark before belonged to, piece by piece: until when each lasted.

        By `time.monotonic()`, which on Linux is what `time.perf_counter()` reads: for clocks of CPUs.
        """
        if not self._muted:
            self._laps += ends

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Within it nobody marks: what is recorded is not what happens now."""
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
        """Make a mark that belongs to no phase."""
        return self._mark()

    def moments(self, marks: Iterable[Any]) -> list[float]:
        """Return when marks were made, in seconds of this process's `time.monotonic()`; on CUDA this waits for them."""
        anchor = self._mark()
        self._seconds(anchor, anchor)  # an event is reached
        now = perf_counter()
        return [now - self._seconds(each, anchor) for each in marks]

    def take(self) -> list[StepTimes]:
        """Return the times of all steps since the last call, oldest first; on CUDA this waits for the last of them."""
        steps, self._steps = self._steps, []
        return [self._resolve(laps) for laps in steps]

    def _resolve(self, laps: list[tuple[Phase, Any]]) -> StepTimes:
        phases: dict[Phase, float] = dict.fromkeys(PHASES, 0.0)
        for (_, before), (phase, after) in pairwise(laps):
            phases[phase] = phases.get(phase, 0.0) + self._seconds(before, after)
        return StepTimes(self._seconds(laps[0][1], laps[-1][1]), phases)


def clock_for(device: torch.device) -> Clock:
    """Return the clock of a device."""
    return Clock(_event, _event_seconds) if device.type == "cuda" else Clock(perf_counter, _difference)


def _difference(before: float, after: float) -> float:
    return after - before


def _event() -> torch.cuda.Event:
    event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _event_seconds(before: torch.cuda.Event, after: torch.cuda.Event) -> float:
    before.synchronize()
    after.synchronize()
    milliseconds: float = before.elapsed_time(after)
    return milliseconds / 1e3
