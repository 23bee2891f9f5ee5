"""Compare training runs with each other: a row for each way to train, each against one of them, the baseline. Pure.

Runs that repeat one point are one row. The run is the unit: steps of one run share its luck. With three runs or more
of both, a row is slower, faster or the same as the baseline as `jobs/measuring/compare.py` decides (at most 2 of 100
comparisons of equals say anything else than the same or no verdict); with fewer there is no verdict.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median, stdev
from typing import Any, Final

from muster.jobs.basics.words import counted
from muster.jobs.measuring.compare import comparison
from muster.jobs.measuring.launches import Launch, MeasuredRow, launch_of, over_launches
from muster.jobs.measuring.sides import LEAST_LAUNCHES
from muster.jobs.measuring.stats import median_interval
from muster.launch.look.steps import PARTS, Measured, losses_of

WORDS: Final = {"worse": "slower", "better": "faster", "same": "same", "no verdict": "no verdict"}
MICRO: Final = 1e6


@dataclass(frozen=True)
class Row:
    """One way to train: what its runs measured, times in seconds. Fields from `speedup` on are against the baseline.

    `low_s` to `high_s` encloses the median with 95 %, where the runs (or of one run, the steps) are enough for it.
    """

    label: str
    run_ids: tuple[str, ...]
    mode: str
    ranks: int
    batch: int | None
    steps: int  # of all runs together, without warm-up
    skipped: int  # of the first run
    median_s: float
    mean_s: float
    std_s: float  # of the runs' medians; of one run, of its steps
    low_s: float
    high_s: float
    parts_s: Mapping[str, float]  # means; they add up to mean_s
    rate: float  # of all ranks, per second
    unit: str
    peak_bytes: int | None
    final_loss: float | None
    speedup: float | None = None
    efficiency: float | None = None  # the speed-up by the ratio of the ranks
    loss_difference: float | None = None  # the largest, of steps that both have
    verdict: str = ""
    why: str = ""

    def record(self) -> dict[str, Any]:
        """Return the row as JSON has it."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class _Timed(MeasuredRow):
    """A row's runs as launches of one measurement."""

    @property
    def key(self) -> str:
        """All rows measured a step."""
        return "a step"

    @property
    def labels(self) -> dict[str, Any]:
        """There is nothing else to say."""
        return {}

    def named(self, *, in_full: bool) -> str:
        """Name it."""
        return "a step"


def compared(groups: Mapping[str, Sequence[Measured]], baseline: str) -> list[Row]:
    """Return a row for each group of runs that repeat one thing; `baseline` is the label of one of them."""
    rows = {label: row_of(label, runs) for label, runs in groups.items()}
    return [_against(rows[label], runs, rows[baseline], groups[baseline]) for label, runs in groups.items()]


def row_of(label: str, runs: Sequence[Measured]) -> Row:
    """Describe the runs of one group."""
    first = runs[0]
    times = [[step.seconds for step in run.steps] for run in runs]
    of_runs = [median(each) for each in times]
    values = of_runs if len(runs) > 1 else times[0]
    low_s, high_s = median_interval(values)
    every = [step for run in runs for step in run.steps]
    mean_s = fmean(step.seconds for step in every)
    peaks = [run.peak_bytes for run in runs if run.peak_bytes is not None]
    return Row(
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
        rate=sum(step.units for step in every) / sum(step.seconds for step in every),
        unit=first.unit,
        peak_bytes=max(peaks, default=None),
        final_loss=first.final_loss,
    )


def scaled(row: Row, base: Row) -> tuple[float | None, float | None]:
    """Return the speed-up and the efficiency of a row against another; None where their rates cannot be compared."""
    speedup = row.rate / base.rate if base.rate and row.unit == base.unit else None
    return speedup, None if speedup is None else speedup * base.ranks / row.ranks


def _against(row: Row, runs: Sequence[Measured], base: Row, base_runs: Sequence[Measured]) -> Row:
    speedup, efficiency = scaled(row, base)
    found = {**asdict(row), "speedup": speedup, "efficiency": efficiency}
    if row.label == base.label:
        return Row(**{**found, "verdict": "baseline"})
    before, after = dict(losses_of(base_runs[0])), dict(losses_of(runs[0]))
    common = before.keys() & after.keys()
    found["loss_difference"] = max((abs(before[step] - after[step]) for step in common), default=None)
    if min(len(runs), len(base_runs)) < LEAST_LAUNCHES:
        least = f"{counted(len(runs), 'run')} against {len(base_runs)}, {LEAST_LAUNCHES} of each are the least"
        return Row(**{**found, "verdict": "no verdict", "why": f"{least}; sweep --repeat 5 makes more"})
    judged = comparison([_timed(base_runs)], [_timed(runs)]).rows[0]
    return Row(**{**found, "verdict": WORDS[judged.verdict], "why": judged.why})


def _timed(runs: Sequence[Measured]) -> _Timed:
    launches: list[Launch] = sorted((_launch(run) for run in runs), key=lambda each: each.time)
    return _Timed(state="ok", **over_launches(launches))


def _launch(run: Measured) -> Launch:
    return launch_of([step.seconds * MICRO for step in run.steps], run.steps[-1].time, None)
