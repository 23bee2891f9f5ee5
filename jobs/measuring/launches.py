"""A row of results: one quantity, measured in several launches, each with freshly started processes. Pure.

A launch's time is the median of its samples, and a row's time is the median of its launches. Neither a scheduler's tick
nor one unlucky launch shifts it. The interval is over launches, because they vary more than calls do (on a shared
machine by 16 %; Hunold & Carpen-Amarie 2016 report the same for clusters). The ends of the interval are order
statistics, as within a launch (`stats.py`): the fastest and the slowest of five launches enclose the median with a
probability of 93.75 % for any distribution. A t-interval of the logarithms is about as wide with five launches (1.24
rather than 1.16 standard deviations to each side), but assumes a distribution without stragglers. With four, three and
two launches, `confidence` is only 87.5 %, 75 % and 50 %. The interval of a single launch is that of its samples.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

from muster.jobs.measuring.stats import confidence_of, median_interval, quantile

ENOUGH: Final = 0.90  # enough confidence; five launches reach 94 %


@dataclass(frozen=True)
class LaunchTimes:
    """The times of one launch: median, interval and lower quartile of its samples, in microseconds."""

    n: int
    p50_us: float
    low_us: float
    high_us: float
    time: float  # end of the launch, in Unix seconds
    quartile_us: float | None  # None if the samples were not kept
    foreign: float | None = None  # share of the CPUs used by other programs, on the host where it is largest


@dataclass(frozen=True, kw_only=True)
class MeasuredRow(ABC):
    """One row, combined over its launches. Times are in microseconds; None means not measured.

    `state` and `reason` are those of the worst launch; the numbers are from the launches that were measured.
    """

    state: str
    reason: str = ""
    launches: int = 0  # number of measured launches
    samples: int = 0
    p50_us: float | None = None  # median of the launches' medians
    low_us: float | None = None
    high_us: float | None = None
    confidence: float = 0.0  # the probability that low_us and high_us enclose the median
    launch_medians_us: tuple[float, ...] = ()
    # The lower quartiles of these launches, which comparisons use; () if samples were not kept.
    launch_quartiles_us: tuple[float, ...] = ()
    launch_times: tuple[float, ...] = ()
    launch_foreign: tuple[float | None, ...] = ()

    @property
    def is_measured(self) -> bool:
        """True if the row has numbers."""
        return self.p50_us is not None

    @property
    def spread(self) -> float | None:
        """Half the width of the interval, as a percentage of the time."""
        if self.p50_us is None or self.low_us is None or self.high_us is None or self.p50_us <= 0:
            return None
        return (self.high_us - self.low_us) / 2 / self.p50_us * 100

    @property
    @abstractmethod
    def key(self) -> Hashable:
        """The key that two rows share if they measured the same thing."""

    @property
    @abstractmethod
    def labels(self) -> dict[str, Any]:
        """The names and sizes of the measured quantity, as JSON."""

    @abstractmethod
    def named(self, *, in_full: bool) -> str:
        """Return the row's name for a sentence. `in_full` adds the properties that all rows of a run share."""

    def unlike(self, other: "MeasuredRow") -> str:
        """Return why two rows with the same key cannot be compared; empty if they can."""
        return ""


def launch_of(samples_us: Sequence[float], time: float, foreign: float | None) -> LaunchTimes:
    """Summarize the samples of one launch."""
    low_us, high_us = median_interval(samples_us)
    return LaunchTimes(len(samples_us), median(samples_us), low_us, high_us, time, quantile(samples_us, 0.25), foreign)


def over_launches(launches: Sequence[LaunchTimes]) -> dict[str, Any]:
    """Compute the fields of a row from its launches, given in the order of time."""
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
    """Describe the confidence of the intervals, which depends on the number of launches."""
    measured = [row for row in rows if row.is_measured]
    if not measured:
        return []
    lowest = min(measured, key=lambda row: row.confidence)
    of = f"{lowest.launches} launch{'es' * (lowest.launches != 1)}"
    what = "medians of the launches" if lowest.launches > 1 else "samples of one launch; another one may differ"
    advice = "; more --launches increase the confidence" if lowest.confidence < ENOUGH or lowest.launches == 1 else ""
    return [f"# +- encloses the median with {lowest.confidence:.0%} confidence ({of}: {what}){advice}"]
