"""Comparison of training runs: one row per configuration, each compared with a baseline row. Pure.

Repeats of a configuration form one row. The run is the statistical unit, because steps of one run are not independent.
With at least three runs on both sides, `jobs/measuring/compare.py` judges a row slower, faster or the same as the
baseline. If both are equal, at most 2 of 100 verdicts are slower or faster. With fewer runs there is no verdict.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median, stdev
from typing import Any, Final

from muster.jobs.basics.words import counted
from muster.jobs.measuring.compare import comparison
from muster.jobs.measuring.launches import LaunchTimes, MeasuredRow, launch_of, over_launches
from muster.jobs.measuring.sides import LEAST_LAUNCHES
from muster.jobs.measuring.stats import median_interval
from muster.launch.look.steps import PARTS, Measured, losses_of
from muster.launch.records.runrows import rate_of

WORDS: Final = {"worse": "slower", "better": "faster", "same": "same", "no verdict": "no verdict"}
MICRO: Final = 1e6


@dataclass(frozen=True)
class RunRow:
    """The measurements of one configuration, in seconds. Fields from `speedup` on compare it with the baseline.

    `low_s` to `high_s` is the 95 % interval of the median over the runs, or over the steps of a single run. With too
    few values it is their range.
    """

    label: str
    run_ids: tuple[str, ...]
    mode: str
    ranks: int
    batch: int | None
    steps: int  # number of steps of all runs together, without warm-up
    skipped: int  # number of warm-up steps of the first run
    median_s: float
    mean_s: float
    std_s: float  # standard deviation over the medians of several runs, or over the steps of a single run
    low_s: float
    high_s: float
    parts_s: Mapping[str, float]  # the mean of each part; they add up to mean_s
    rate: float  # units per second, over all ranks
    unit: str
    peak_bytes: int | None
    final_loss: float | None
    speedup: float | None = None
    efficiency: float | None = None  # speed-up divided by the ratio of the rank counts
    loss_difference: float | None = None  # largest difference over the steps that are in both rows
    verdict: str = ""
    why: str = ""
    slow: tuple[str, ...] = ()  # the stragglers of its runs, with the evidence

    def record(self) -> dict[str, Any]:
        """Return the row for JSON."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class _Timed(MeasuredRow):
    """The runs of a row in the form that `jobs/measuring/compare.py` compares, one launch per run."""

    @property
    def key(self) -> str:
        """The name of the measured quantity, the same for all rows."""
        return "a step"

    @property
    def labels(self) -> dict[str, Any]:
        """No further labels."""
        return {}

    def named(self, *, in_full: bool) -> str:
        """Return the name of the measured quantity."""
        return "a step"


def compared(groups: Mapping[str, Sequence[Measured]], baseline: str) -> list[RunRow]:
    """Return a row for each group of repeated runs, compared with the group labeled `baseline`."""
    rows = {label: row_of(label, runs) for label, runs in groups.items()}
    return [_against(rows[label], runs, rows[baseline], groups[baseline]) for label, runs in groups.items()]


def row_of(label: str, runs: Sequence[Measured]) -> RunRow:
    """Summarize the runs of one group."""
    first = runs[0]
    times = [[step.seconds for step in run.steps] for run in runs]
    of_runs = [median(each) for each in times]
    values = of_runs if len(runs) > 1 else times[0]
    low_s, high_s = median_interval(values)
    every = [step for run in runs for step in run.steps]
    mean_s = fmean(step.seconds for step in every)
    peaks = [run.peak_bytes for run in runs if run.peak_bytes is not None]
    return RunRow(
        label=label,
        run_ids=tuple(run.run_id for run in runs),
        mode=first.mode,
        ranks=first.ranks,
        batch=first.batch,
        steps=len(every),
        skipped=first.skipped,
        median_s=median(of_runs),
        mean_s=mean_s,
        std_s=stdev(values) if len(values) > 1 else 0.0,
        low_s=low_s,
        high_s=high_s,
        parts_s={part: fmean(step.parts[part] for step in every) for part in PARTS},
        rate=rate_of((step.units, step.seconds) for step in every),
        unit=first.unit,
        peak_bytes=max(peaks, default=None),
        final_loss=first.final_loss,
        slow=tuple(f"{each.name}: {each.evidence}" for run in runs for each in run.stragglers),
    )


def scaled(row: RunRow, base: RunRow) -> tuple[float | None, float | None]:
    """Return the speed-up and the efficiency of `row` over `base`, or None for both if the units of rate differ."""
    speedup = row.rate / base.rate if base.rate and row.unit == base.unit else None
    return speedup, None if speedup is None else speedup * base.ranks / row.ranks


def _against(row: RunRow, runs: Sequence[Measured], base: RunRow, base_runs: Sequence[Measured]) -> RunRow:
    speedup, efficiency = scaled(row, base)
    found = {**asdict(row), "speedup": speedup, "efficiency": efficiency}
    if row.label == base.label:
        return RunRow(**{**found, "verdict": "baseline"})
    before, after = dict(losses_of(base_runs[0])), dict(losses_of(runs[0]))
    common = before.keys() & after.keys()
    found["loss_difference"] = max((abs(before[step] - after[step]) for step in common), default=None)
    if min(len(runs), len(base_runs)) < LEAST_LAUNCHES:
        least = f"{counted(len(runs), 'run')} against {len(base_runs)}, but a verdict needs {LEAST_LAUNCHES} of each"
        return RunRow(**{**found, "verdict": "no verdict", "why": f"{least}; repeat with muster sweep --repeat 5"})
    judged = comparison([_timed(base_runs)], [_timed(runs)]).rows[0]
    return RunRow(**{**found, "verdict": WORDS[judged.verdict], "why": judged.why})


def _timed(runs: Sequence[Measured]) -> _Timed:
    launches: list[LaunchTimes] = sorted((_launch(run) for run in runs), key=lambda each: each.time)
    return _Timed(state="ok", **over_launches(launches))


def _launch(run: Measured) -> LaunchTimes:
    return launch_of([step.seconds * MICRO for step in run.steps], run.steps[-1].time, None)
