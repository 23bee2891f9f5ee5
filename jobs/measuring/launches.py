"""A row over its launches: one thing, measured once in each of several fresh starts of processes. Pure.

A launch's time is its median, a row's time the median of its launches': neither a scheduler's tick nor one unlucky
launch moves it. Its interval is over launches, which differ more than calls do (on a shared machine by 16 %, Hunold &
Carpen-Amarie 2016 saw the same on clusters), and is that of order statistics, as within a launch (`stats.py`): with
five launches the quickest and the slowest, which enclose the median with 93.75 % whatever the distribution. A
t-interval of the logarithms is as wide at five (1.24 against 1.16 standard deviations to each side) and believes in a
distribution that has no stragglers. With fewer launches less is known, and `confidence` says how much: 87.5 %, 75 %,
50 %; one launch has the interval of its own samples.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

from muster.jobs.measuring.stats import confidence_of, median_interval, quantile

ENOUGH: Final = 0.90  # confidence; five launches have 94 %


@dataclass(frozen=True)
class Launch:
    """The times of one launch: median, interval and lower quartile of its samples, in microseconds."""

    n: int
    p50_us: float
    low_us: float
    high_us: float
    time: float  # unix seconds, at its end
    quartile_us: float | None  # None: the samples were not kept
    foreign: float | None = None  # what others took of the worst host's cores


@dataclass(frozen=True, kw_only=True)
class MeasuredRow(ABC):
    """One row over its launches. Times are in microseconds; None: not measured.

    `state` and `reason` are those of the worst launch; the numbers are of the launches that were measured.
    """

    state: str
    reason: str = ""
    launches: int = 0  # that were measured
    samples: int = 0
    p50_us: float | None = None  # median of launch medians
    low_us: float | None = None
    high_us: float | None = None
    confidence: float = 0.0  # that low_us and high_us enclose the median over launches
    launch_medians_us: tuple[float, ...] = ()
    # Of the same launches, in the same order. Lower quartiles are what is compared; () where samples were not kept.
    launch_quartiles_us: tuple[float, ...] = ()
    launch_times: tuple[float, ...] = ()
    launch_foreign: tuple[float | None, ...] = ()

    @property
    def is_measured(self) -> bool:
        """True if there are numbers."""
        return self.p50_us is not None

    @property
    def spread(self) -> float | None:
        """Half the interval of the time as a percentage of it."""
        if self.p50_us is None or self.low_us is None or self.high_us is None or self.p50_us <= 0:
            return None
        return (self.high_us - self.low_us) / 2 / self.p50_us * 100

    @property
    @abstractmethod
    def key(self) -> Hashable:
        """What two rows of two results have in common if they measured the same thing."""

    @property
    @abstractmethod
    def labels(self) -> dict[str, Any]:
        """The names and sizes of what was measured, as JSON."""

    @abstractmethod
    def named(self, *, in_full: bool) -> str:
        """Name the row in a sentence; `in_full` with what all rows of a run have in common."""

    def unlike(self, other: "MeasuredRow") -> str:
        """Say why two rows of one key cannot be compared; empty if they can."""
        return ""


def launch_of(samples_us: Sequence[float], time: float, foreign: float | None) -> Launch:
    """Describe the samples of one launch."""
    low_us, high_us = median_interval(samples_us)
    return Launch(len(samples_us), median(samples_us), low_us, high_us, time, quantile(samples_us, 0.25), foreign)


def over_launches(launches: Sequence[Launch]) -> dict[str, Any]:
    """Return the fields of a row that its launches decide; they are in the order of time."""
    medians_us = [each.p50_us for each in launches]
    quartiles_us = [each.quartile_us for each in launches if each.quartile_us is not None]
    low_us, high_us, confidence = launches[0].low_us, launches[0].high_us, confidence_of(launches[0].n)
    if len(launches) > 1:
        (low_us, high_us), confidence = median_interval(medians_us), confidence_of(len(launches))
    return {
        "launches": len(launches),
        "samples": sum(each.n for each in launches),
        "p50_us": median(medians_us),
        "low_us": low_us,
        "high_us": high_us,
        "confidence": confidence,
        "launch_medians_us": tuple(medians_us),
        "launch_quartiles_us": tuple(quartiles_us) if len(quartiles_us) == len(launches) else (),
        "launch_times": tuple(each.time for each in launches),
        "launch_foreign": tuple(each.foreign for each in launches),
    }


def confidence_lines(rows: Sequence[MeasuredRow]) -> list[str]:
    """Say what the intervals are worth, which depends on the number of launches."""
    measured = [row for row in rows if row.is_measured]
    if not measured:
        return []
    lowest = min(measured, key=lambda row: row.confidence)
    of = f"{lowest.launches} launch{'es' * (lowest.launches != 1)}"
    what = "medians of the launches" if lowest.launches > 1 else "samples of one launch, which say nothing of others"
    advice = "; more --launches make it surer" if lowest.confidence < ENOUGH or lowest.launches == 1 else ""
    return [f"# +- encloses the median with {lowest.confidence:.0%} ({of}: {what}){advice}"]
